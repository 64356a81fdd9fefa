"""Faults for the judge to find: what each does, how it is put into an engine from outside, and one run with it.

plant.py     one name of one module replaced, for the time of one run, and proof that it was called
faults.py    what a fault is, as data, and the jobs that faults are planted in
catalogue.py all of them; wrong_numbers.py those that grades have to find
shards.py    plants that change gradients or weights by rows, one way of planting for each engine
steps.py     plants outside the engine: data, seeds, loss, optimizer
messages.py  plants that change which messages are sent, when, and what is kept
models.py    models that some faults need
changes.py   what these do to the rows
healthy.py   what a run has more of than the healthy one: bytes, exposed messages
run.py       one engine on one job on one rank, with a fault or healthy
"""
