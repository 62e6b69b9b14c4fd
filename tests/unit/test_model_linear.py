"""Linear layers in oneDNN: the same function and the same gradient as torch's own, and nothing else about them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from headrace.model.linear import OneDnnLinear, onednn_serves, product, round_up, use_onednn


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8, 24), (7, 24), (2, 6, 24), (2, 5, 24), (1, 1, 24)])
def test_same_value_and_gradients_as_in_float64(shape: tuple[int, ...], bias: bool) -> None:
    """I4: no further from float64 than 1e-6, for input, weight and bias."""
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    assert type(fast) is OneDnnLinear
    exact = copy.deepcopy(plain).double()
    input = torch.randn(shape)
    results = []
    for layer, dtype in ((fast, torch.float32), (exact, torch.float64)):
        leaf = input.detach().clone().to(dtype).requires_grad_()
        output = layer(leaf)
        output.square().sum().backward()
        assert leaf.grad is not None
        results.append([output.detach(), leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) == (4 if bias else 3)
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert _relative(got, expected) < 1e-6


def test_gradients_only_where_they_are_needed() -> None:
    """A frozen weight (LoRA's base) gets no gradient, and an input without gradient costs no product."""
    layer = nn.Linear(8, 4)
    use_onednn(layer)
    layer.weight.requires_grad_(False)
    layer(torch.randn(3, 8)).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_other_dtypes_and_subclasses_are_left_alone() -> None:
    """float64 (tests), bfloat16 and somebody's own layer keep their own product."""

    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4))
    use_onednn(model)
    assert [type(m) for m in model] == [OneDnnLinear, Own]
    assert not onednn_serves(torch.zeros(2, dtype=torch.float64))
    layer, input = model[0].double(), torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(layer(input), nn.functional.linear(input, layer.weight, layer.bias))


def test_an_empty_row_gives_an_empty_result() -> None:
    layer = nn.Linear(4, 6)
    use_onednn(layer)
    assert layer(torch.zeros(0, 4)).shape == (0, 6)


def test_product_of_a_transposed_view() -> None:
    """The gradient of the input multiplies by the weight the other way round, without a copy."""
    torch.manual_seed(1)
    weight, grad = torch.randn(40, 24), torch.randn(7, 40)
    assert _relative(product(grad, weight.t()), grad.double() @ weight.double()) < 1e-6


def test_products_are_made_of_few_numbers_of_rows() -> None:
    """oneDNN keeps code for each: batches of every length would fill the memory."""
    numbers = [round_up(n) for n in range(1, 1025)]
    assert len(set(numbers)) == 48 and all(round_up(n) == n for n in numbers)
    assert all(n <= r <= max(n + 3, 1.25 * n) for n, r in enumerate(numbers, start=1))
    weight, bias = torch.randn(40, 24), torch.randn(40)
    for num_rows in (1, 5, 32, 33, 65, 300):
        input = torch.randn(num_rows, 24)
        found = product(input, weight, bias)
        assert found.shape == (num_rows, 40)
        assert _relative(found, input.double() @ weight.double().T + bias) < 1e-6


def test_an_odd_number_of_rows_is_not_new_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer leaves it to the other library, forward and backward."""
    seen: list[int] = []
    plain = torch.ops.mkldnn._linear_pointwise

    class Watched:
        def _linear_pointwise(self, input: Tensor, *rest: object) -> Tensor:
            seen.append(len(input))
            return plain(input, *rest)

    monkeypatch.setattr(torch.ops, "mkldnn", Watched())
    layer = nn.Linear(8, 4)
    use_onednn(layer)
    for num_rows in range(1, 70):
        layer(torch.randn(num_rows, 8, requires_grad=True)).sum().backward()
    assert set(seen) == {round_up(n) for n in range(1, 66)} - {80}
