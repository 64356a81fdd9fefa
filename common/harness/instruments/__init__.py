"""Instruments: what a step did, read from its tensors and from profiler events; they know nothing of engines.

    gradients     the whole gradient of each parameter, its digest and norm
    collectives   operations and bytes by phase
    memory        live bytes over one step, from blocks (lifetimes) of which each is of one class (memory_classes)
    trace         one step as spans on lanes

The profiler disturbs what it watches, so a judged step is never a profiled one, and each instrument has its own step.
"""
