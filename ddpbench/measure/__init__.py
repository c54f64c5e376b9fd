"""Measure operations and training steps in every rank.

repetitions.py  an operation: warm-up, number of repetitions, precision
loop.py         an operation: its buffers and the timing loop
rounds.py       a training step: warm-up, number of rounds, the variants in turn
step.py         a training step: one step with its time stamps
"""
