"""The record: the run's folder, whose files are the truth (DESIGN.md section 7).

One writer per file. What is appended is readable to its last complete line after kill -9; what is replaced is replaced
by rename. Readers need no running process and no torch.
"""
