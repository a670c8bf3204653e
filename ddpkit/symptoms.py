"""Known symptoms: what an error usually means, and what to try. Data, read by explain.py; the first that fits is taken.

Each was met by many: the comment names a public thread. The pattern is looked for in "Type: text" of the exception.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """What can be said where a pattern is found in an exception."""

    name: str
    shown: str
    """What a person sees: a piece of the message."""
    pattern: str
    means: str
    cure: str


TIMEOUT = "wait timed out"
SYMPTOMS = (
    Symptom(  # pytorch/pytorch#43259
        "unused parameters",
        "Expected to have finished reduction in the prior iteration",
        r"Expected to have finished reduction in the prior iteration",
        "some parameters took no part in the loss, so DDP waits for gradients that never come",
        "take the layer out of the model, let it take part in the loss, or wrap with find_unused_parameters=True "
        "(DDP then searches the graph in every step, which costs time)",
    ),
    Symptom(  # pytorch/pytorch#22095. Newer torch (2.14 does) sends buffers past autograd, which then notices nothing
        "two forwards with buffers",
        "has been modified by an inplace operation",
        r"modified by an inplace operation",
        "a tensor that backward needs has changed; under DDP it is often a buffer (BatchNorm), sent anew by a second forward before the backward",
        "wrap with broadcast_buffers=False, or join both inputs into one forward",
    ),
    Symptom(  # pytorch/pytorch#46821
        "device_ids with a CPU model",
        "device_ids and output_device arguments only work with …",
        r"device_ids and output_device arguments only work with",
        "device_ids was given, and the model is on the CPU",
        "leave device_ids out: DDP(model); it is for models on a GPU",
    ),
    Symptom(  # pytorch/examples#1034
        "tensors on unlike devices",
        "Expected all tensors to be on the same device",
        r"be on the same device|is not on the expected device|No backend type associated with device type|Tensors must be CUDA",
        "tensors are on different devices, or on one that the backend does not serve (gloo: cpu and cuda, nccl: cuda)",
        "move the model and every batch to the rank's own device: .to(device)",
    ),
    Symptom(  # NVIDIA/nccl#1241
        "two ranks on one GPU",
        "Duplicate GPU detected",
        r"Duplicate GPU detected|invalid usage.*NCCL|ncclInvalidUsage",
        "nccl wants a GPU of its own for each rank",
        'use the backend "gloo", fewer ranks, or torch.cuda.set_device(local_rank)',
    ),
    Symptom(  # huggingface/accelerate#1293
        "CUDA in a forked process",
        "Cannot re-initialize CUDA in forked subprocess",
        r"Cannot re-initialize CUDA in forked subprocess",
        "a process that had used the GPU was forked (a DataLoader worker, for example)",
        'use multiprocessing_context="spawn" for the DataLoader, or keep CUDA out of the Dataset',
    ),
    Symptom(
        "GPU memory is full",
        "CUDA out of memory",
        r"CUDA out of memory|OutOfMemoryError",
        "the GPU's memory is full; all ranks on one GPU share it",
        "use smaller batches, or fewer ranks on that GPU",
    ),
    Symptom(  # Lightning-AI/pytorch-lightning#2231
        "port taken",
        "EADDRINUSE: address already in use",
        r"EADDRINUSE|[Aa]ddress already in use",
        "another program listens at MASTER_PORT already: an earlier run, perhaps, or another notebook",
        "leave MASTER_ADDR and MASTER_PORT to ddpkit.spawn, which takes a free port, or choose another number",
    ),
    Symptom(  # pytorch/pytorch#43536
        "group made twice",
        "trying to initialize the default process group twice",
        r"initialize the default process group twice|init_process_group was called twice",
        "this rank has a default process group already",
        "call init_process_group once, at the beginning, and destroy_process_group at the end",
    ),
    Symptom(
        "no group yet",
        "Default process group has not been initialized",
        r"Default process group has not been initialized",
        "a collective or DDP was used before the process group was made",
        'call dist.init_process_group("gloo") first, in every rank',
    ),
    Symptom(  # pytorch/vision#1938
        "MNIST",
        "Error downloading train-images",
        r"Error downloading (train|t10k)|Dataset not found\. You can use download=True",
        "torchvision looks for MNIST's files in this folder and they are not there, or could not be downloaded",
        "use datasets.MNIST(ddpkit.data.mnist_root(), train=True): 10,000 digits, without a network",
    ),
    Symptom(  # pytorch/pytorch#26166
        "name not resolved",
        "Name or service not known",
        r"(?i)gai error|getaddrinfo|name or service not known|name resolution|gethostbyname|unable to resolve",
        "a host name could not be resolved: MASTER_ADDR, or this machine's own name, which gloo asks for",
        "use an address, such as 127.0.0.1 for one machine, and set GLOO_SOCKET_IFNAME to the interface (lo on one machine)",
    ),
    Symptom(  # pytorch/pytorch#156627, Lightning-AI/pytorch-lightning#7773
        "models differ",
        "appears not to match sizes of the same param",
        r"appears not to match (sizes|strides)|expects same model across all ranks|params? .* in process \d",
        "the ranks wrapped models of unlike shape, or with unlike numbers of parameters",
        "build the same model in every rank; nothing about its layers may depend on the rank",
    ),
    Symptom(  # NVIDIA/nccl#1394
        "tensors differ",
        "Detected mismatch between collectives",
        r"op\.preamble\.length|preamble.*nbytes|Detected mismatch between collectives|tensor sizes? must match|invalid tensor (size|type) at index",
        "the ranks gave tensors of unlike shape or dtype to one collective",
        "make shape and dtype equal in all ranks: pad, or exchange the sizes first",
    ),
    Symptom(  # pytorch/pytorch#11201
        "too many open files",
        "Too many open files",
        r"Too many open files",
        "the process has as many files open as it may (`ulimit -n`); DataLoader workers hand each tensor over as an open file",
        'use fewer workers, or torch.multiprocessing.set_sharing_strategy("file_system") at the beginning of the function',
    ),
    Symptom(  # pytorch/pytorch#5040
        "/dev/shm is full",
        "Bus error, or: No space left on device",
        r"(?i)bus error|insufficient shared memory|unable to (open|write|mmap).*(shm|shared memory)|out of shared memory|no space left on device",
        "shared memory (/dev/shm) or the disk is full; DataLoader workers hand their batches over through /dev/shm, and containers have 64 MB of it",
        "use num_workers=0 or smaller batches, or start the container with a larger --shm-size",
    ),
    Symptom(  # pytorch/pytorch#14390
        "a DataLoader worker died",
        "DataLoader worker exited unexpectedly",
        r"DataLoader worker .*(killed|exited unexpectedly)",
        "a process of the DataLoader was ended: memory ran out, or it crashed",
        "use num_workers=0 to see its own error, or fewer workers",
    ),
    Symptom(  # pytorch/pytorch#3805
        "module. prefix",
        'Missing key(s) in state_dict: "module.…"',
        r'(?s)(Missing|Unexpected) key\(s\) in state_dict:.*"module\.',
        "the names in one of the two begin with module.: the state dict was taken from the DDP wrapper, or goes into it",
        "save model.module.state_dict() and load it into the model without its wrapper",
    ),
    Symptom(  # ROCm/Megatron-LM#56
        "weights_only",
        "Weights only load failed",
        r"Weights only load failed",
        "the file holds objects besides tensors, and torch.load does not run their code unless it is told to trust the file",
        "save plain dicts, lists, numbers and tensors; for a file of your own, torch.load(path, weights_only=False)",
    ),
    Symptom(  # pytorch/pytorch#20375
        "class of a cell",
        "Can't get attribute 'Net' on <module '__main__'",
        r"Can't get attribute '.*' on <module '__main__'",
        "an object is unpickled whose class was typed into a cell, and a rank knows of the cells only what its function uses",
        "use the class by name in the function, or save plain dicts, lists, numbers and tensors",
    ),
    Symptom(  # pytorch/pytorch#49846
        "a number in the environment",
        "TypeError: str expected, not int",
        r"TypeError: str expected, not \w+$",
        "environment variables are text, and something else was put in",
        'write it in quotes: os.environ["WORLD_SIZE"] = "2"',
    ),
    Symptom(  # karpathy/nanochat#336
        "half a checkpoint",
        "PytorchStreamReader failed, or: no such file: '….pt'",
        r"FileNotFoundError.*\.(pt|pth|ckpt|bin)'|PytorchStreamReader failed|pickle data was truncated|central directory$|Ran out of input",
        "a checkpoint is read that is not there yet, or not whole: another rank may still be writing it",
        "let rank 0 save, then dist.barrier() in all ranks, and only then load",
    ),
    Symptom(
        "only in a notebook",
        "name 'display' is not defined",
        r"name '(display|get_ipython)' is not defined",
        "this name exists in the notebook only; a rank is a process without IPython",
        "print in the rank, or return the object and show it in the notebook",
    ),
    Symptom(
        "nobody to ask",
        "EOFError: EOF when reading a line",
        r"EOFError: EOF when reading a line",
        "input() was called in a rank, and nobody can answer there",
        "ask in the notebook and pass the answer in args",
    ),
    Symptom(
        TIMEOUT,
        "Timed out waiting 1800000ms for recv operation to complete",
        r"Timed out waiting \d+ ?ms|^torch\.distributed\..*([Tt]imed out|wait timeout) after|Watchdog caught collective operation timeout",
        "a rank waited in a collective for longer than the timeout, and the others did not come",
        "look where the other ranks are: every rank must make the same calls, equally often; where one only needs longer, give a longer timeout",
    ),
)


def find(headline: str) -> Symptom | None:
    """The known symptom that an exception shows, given "Type: text"; None for an unknown one."""
    return next((symptom for symptom in SYMPTOMS if re.search(symptom.pattern, headline)), None)


def is_timeout(headline: str) -> bool:
    """Whether an exception says that a wait for other ranks was given up."""
    symptom = find(headline)
    return symptom is not None and symptom.name == TIMEOUT
