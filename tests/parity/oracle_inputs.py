"""Inputs of the oracle's vectors, chosen so that every branch of every formula binds (test_oracle.py asserts it).

Masked slots hold plausible garbage: a leak shifts the digits. No token stands on a kink of any formula used.
"""

from __future__ import annotations

from dataclasses import replace

from oracle_core import Batch
from oracle_presets import Rollout

# ALGORITHMS.md, golden vectors.
GOLDEN = Batch(
    new=[[-0.5, -1.0, -2.0], [-0.7, -0.2]],
    old=[[-0.6, -1.5, -1.8], [-0.7, -0.9]],
    roll=[[-0.55, -1.4, -1.9], [-0.75, -0.8]],
    ref=[[-0.4, -1.2, -2.2], [-0.9, -0.3]],
    advantage=[[1.0] * 3, [-1.0] * 2],
    mask=[[1, 1, 1], [1, 1]],
    max_length=4,
)

# Seven sequences of 1 to 5 positions; advantages of both signs and 0, constant in a sequence.
# Ratios below, inside and above the clip for both signs, one between 1.2 and 1.28 with A > 0, one beyond dual clip;
# rho below, inside and above [0.5, 2];
# pi - mu beyond 0.1 both ways for both signs; pi/mu beyond 20 once, on a token that DPPO keeps.
BATCH = Batch(
    new=[
        [-0.50, -1.00, -3.30, -2.00, -0.90],
        [-0.70],
        [-2.20, -0.20, -1.70, -0.35],
        [-1.60, -0.90],
        [-1.30, -0.60, -0.45, -0.15],
        [-1.90, -0.25, -1.10],
        [-0.80, -1.60],
    ],
    old=[
        [-0.60, -1.50, -0.40, -1.55, -0.83],
        [-1.15],
        [-0.10, -0.90, -1.20, -0.30],
        [-0.80, -2.30],
        [-1.10, -0.30, -0.50, -2.40],
        [-1.20, -0.45, -0.95],
        [-0.90, -1.30],
    ],
    roll=[
        [-0.55, -1.40, -5.00, -2.90, -0.10],
        [-1.00],
        [-0.90, -0.70, -2.00, -0.33],
        [-0.90, -4.50],
        [-1.05, -0.40, -0.62, -0.75],
        [-1.25, -0.22, -1.00],
        [-0.85, -1.35],
    ],
    ref=[
        [-0.40, -1.20, -0.20, -2.20, -1.30],
        [-0.90],
        [-3.10, -0.30, -0.40, -0.36],
        [-1.00, -1.50],
        [-1.45, -0.52, -0.71, -4.00],
        [-1.65, -0.61, -0.80],
        [-0.95, -1.20],
    ],
    advantage=[[1.25] * 5, [0.5], [-0.75] * 4, [-1.5] * 2, [-0.4] * 4, [0.9] * 3, [0.0] * 2],
    mask=[[1, 1, 0, 1, 1], [1], [0, 1, 1, 1], [1, 1], [1, 1, 1, 0], [1, 1, 1], [1, 1]],
    max_length=6,
)

# The same tokens with an advantage that differs inside a sequence, as GAE and REINFORCE++ give.
TOKEN_BATCH = replace(
    BATCH,
    advantage=[
        [1.25, 0.80, 9.00, -0.60, 0.35],
        [0.55],
        [9.00, -0.75, -1.10, 0.20],
        [-1.50, -0.45],
        [-0.40, 0.30, -0.90, 9.00],
        [0.90, 1.40, -0.20],
        [0.00, 0.65],
    ],
)

# One token with rho = exp(-9.8) < 1e-4, one sequence whose summed log rho is beyond +20, one below -20; the last has a
# token that is rare under both policies, which is no reason for a veto.
EXTREME = Batch(
    new=[[-0.5, -9.8, -1.0], [-0.4, -0.7], [-0.3, -1.1], [-12.0, -11.5], [-9.6, -0.5]],
    old=[[-0.6, -9.9, -1.2], [-0.5, -0.6], [-0.2, -1.0], [-12.1, -11.7], [-9.9, -0.6]],
    roll=[[-0.7, -0.1, -1.1], [-0.6, -0.5], [-10.5, -12.0], [-0.2, -0.1], [-9.7, -0.4]],
    ref=[[-0.4, -1.2, -2.2], [-0.9, -0.3], [-0.8, -0.7], [-0.5, -0.6], [-9.0, -0.7]],
    advantage=[[1.0] * 3, [-0.5] * 2, [0.7] * 2, [-0.8] * 2, [0.6] * 2],
    mask=[[1, 1, 1], [1, 1], [1, 1], [1, 1], [1, 1]],
    max_length=3,
)

# GSPO's cap on log s: s = exp(0.9), exp(0.2) with the cap at 0.5.
CAPPED = Batch(
    new=[[-0.5, -0.4], [-0.7, -0.6]],
    old=[[-1.4, -1.3], [-0.9, -0.8]],
    roll=[[-1.4, -1.3], [-0.9, -0.8]],
    ref=[[-1.4, -1.3], [-0.9, -0.8]],
    advantage=[[-1.0] * 2, [0.6] * 2],
    mask=[[1, 1], [1, 1]],
    max_length=2,
)

# Policy version that sampled each token of BATCH: fresh, one and three behind version 5; a reply that spans versions.
VERSIONS = [[2, 2, 4, 4, 5], [5], [3, 3, 3, 4], [4, 4], [2, 3, 4, 5], [5, 5, 5], [1, 2]]

# Groups of 3, 2 and 2; the last has equal rewards (no signal).
ROLLOUT = Rollout(
    batch=BATCH,
    rewards=[1.0, 0.0, 0.5, 0.0, 1.0, 0.75, 0.75],
    group_sizes=[3, 2, 2],
    greedy=[0.25, 0.25, 0.25, 1.0, 1.0, 0.5, 0.5],
    values=[
        [0.30, 0.45, 7.00, 0.60, 0.85],
        [0.20],
        [7.00, 0.55, 0.40, 0.35],
        [0.30, 0.10],
        [0.50, 0.65, 0.70, 7.00],
        [0.60, 0.80, 0.70],
        [0.75, 0.90],
    ],
)

# Old values and targets for the value loss with epsilon 0.2: V inside, above and below Vo +- eps; the clipped loss
# larger (gradient 0) and smaller (V wins) for both directions.
OLD_VALUES = [
    [0.25, 0.10, 3.00, 0.95, 0.50],
    [0.60],
    [3.00, 0.50, 0.05, 0.70],
    [0.35, 0.45],
    [0.10, 0.60, 0.95, 3.00],
    [0.55, 0.85, 0.30],
    [0.70, 0.85],
]
TARGETS = [
    [1.0, 1.0, -5.0, 0.2, 0.4],
    [0.0],
    [-5.0, 0.5, 0.9, 0.9],
    [0.0, 0.9],
    [0.1, 1.0, 0.3, -5.0],
    [0.75, 0.6, 0.2],
    [0.75, 0.75],
]

LOGITS = [[1.0, -0.5, 0.25, 2.0], [0.0, 0.0, 0.0, 0.0], [5.0, -3.0, 0.5, -1.0]]
TEACHER_LOGITS = [[0.5, 0.0, -0.75, 2.5], [1.0, -1.0, 0.5, 0.0], [4.0, 1.0, 0.5, -2.0]]

# Per-token weights of the supervised and the distillation stream; the supervised stream trains other tokens.
STREAM_WEIGHTS = [
    [1.0, 0.5, 9.0, 2.0, 1.0],
    [0.25],
    [9.0, 1.0, 1.5, 0.0],
    [1.0, 0.75],
    [1.0, 1.0, 2.0, 9.0],
    [0.1, 1.0, 1.0],
    [1.0, 3.0],
]
SUPERVISED_MASK = [[0, 0, 0, 0, 0], [0], [0, 1, 1, 1], [1, 1], [1, 0, 1, 0], [0, 0, 0], [0, 0]]
