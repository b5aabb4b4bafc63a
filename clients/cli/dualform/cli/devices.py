"""`dualform index inspect --device`: what of an index lies where on GPUs, tried out."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dualform.cli.errors import CommandError
from dualform.cli.output import bytes_text, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dualform.engine.devices.devices import DeviceState, Residence


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "--device",
        metavar="GPU[,GPU…]",
        help="bring the index there, as a server would, and say what lies where: auto, cuda, "
        "cuda:1, or several",
    )
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="how much of each GPU's memory may be taken: a share such as 0.8, or such as 20GiB",
    )


@dataclass(frozen=True)
class OnDevices:
    """What lies where.

    Attributes:
        states: Each device.
        layers: By name, what lies on which.
    """

    states: Sequence[DeviceState]
    layers: Mapping[str, Sequence[Residence]]


def as_json(held: OnDevices | None) -> dict[str, Any] | None:
    """For --json."""
    if held is None:
        return None
    return {
        "states": [asdict(state) for state in held.states],
        "layers": {name: [asdict(each) for each in lie] for name, lie in held.layers.items()},
    }


def show(held: OnDevices | None) -> None:
    """As tables, where there is anything to tell."""
    if held is None:
        return
    print()
    print_table(
        ["device", "is", "may hold", "holds", "refused"],
        [
            [
                state.name,
                state.title,
                bytes_text(state.budget),
                bytes_text(state.used),
                state.refused or "no",
            ]
            for state in held.states
        ],
    )
    print()
    print_table(
        ["layer", "device", "rows", "keys", "values"],
        [
            [name, each.device, each.rows, bytes_text(each.key_bytes), _values(each)]
            for name, lie in held.layers.items()
            for each in lie
        ],
    )


def _values(residence: Residence) -> str:
    return bytes_text(residence.value_bytes) if residence.value_bytes else "on the host"


def held(options: argparse.Namespace) -> OnDevices | None:
    """What of the index lies where, once all that fits does; None without --device.

    Raises:
        CommandError: No such device, or it is not there.
    """
    if options.device is None:
        if options.gpu_memory is not None:
            raise CommandError("--gpu-memory says how much of a --device may be taken: name one")
        return None
    from dualform.engine import Index
    from dualform.engine.devices.devices import Devices
    from dualform.questions.placement import GPU_MEMORY

    names = options.device.split(",")
    memory: float | str = GPU_MEMORY if options.gpu_memory is None else options.gpu_memory
    try:
        devices = Devices.find(names[0] if len(names) == 1 else names, _number(memory))
    except ValueError as error:
        raise CommandError(str(error)) from None
    if not devices.states():
        raise CommandError(f"there is no GPU to bring the index to: {devices.why_not()}")
    with Index.open(options.index, devices=devices) as index:
        devices.settle()
        layers = {name: devices.residences(layer) for name, layer in index.layers.items()}
        states = devices.states()
    devices.close()
    return OnDevices(states, layers)


def _number(given: float | str) -> float | str:
    """A share as a number, where it is one."""
    try:
        return float(given)
    except ValueError:
        return given
