"""Schemes that no search uses, priced by the formulas of the survey's table (EQUATIONS T6).

All n devices run one scheme. Products divide evenly, so compute is that of one device over n.
Nothing is hidden under compute. A step has M micro-batches of b sequences on all devices together;
a data-parallel scheme has b on each. Other copies of all n devices share the batch, and all-reduce
gradients of the parameters that a device holds once a step.

    parameter server    p + g of all parameters through one server's network interface, for each
                        of n workers (Li et al. 2014, OSDI, "Scaling Distributed Machine Learning
                        with the Parameter Server")
    asynchronous        workers do not wait for one another: the server or the compute decides
    local SGD           H local steps, then an all-reduce of the fp32 parameters (Stich 2019, arXiv
                        1805.09767)
    2.5-D, n = q q d    each product: all-gathers of X over a row and of W over a column, in the
                        backward pass twice as much (2-D, EQUATIONS T7) on each of d layers, with
                        b / d, and an all-reduce of weight gradients over d (Wang et al. 2021,
                        arXiv 2105.14500)
    3-D, n = l l l      each product: all-gathers of X and of W and a reduce-scatter of Y, each over
                        l, in the backward pass twice as much (Bian et al. 2021, arXiv 2105.14450)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
)
from parplan.costmodels.communication.mesh import place_axis
from parplan.costmodels.operators.kernels import FP32_BYTES
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKey, OperatorKind
from parplan.profiles.models.spec import Precision
from parplan.profiles.provenance import Kind

WHOLE = Sharding()
BACKWARD = 2  # passes of communication in the backward pass for one in the forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeCost:
    """The price of one scheme in a step, per device.

    compute_s, comm_s   seconds of compute, and of communication that it does not hide
    wait_s              seconds in which a pipeline stage waits
    sent_bytes          bytes that a device sends
    states_bytes        parameters, gradients and optimizer states
    activation_bytes    saved activations and temporaries at the peak
    kind                kind of the seconds
    """

    compute_s: float
    comm_s: float
    wait_s: float = 0.0
    sent_bytes: float
    states_bytes: float
    activation_bytes: float
    kind: Kind = Kind.ANALYTIC

    @property
    def step_s(self) -> float:
        return self.compute_s + self.comm_s + self.wait_s


@dataclass(frozen=True, slots=True)
class ProductBytes:
    """Bytes of the input, the weight and the output of one product, and how often it runs."""

    inputs: float
    weight: float
    outputs: float
    count: int


@dataclass(frozen=True, slots=True)
class SchemeCase:
    """A model on n devices, with micro-batches of b sequences on all of them together.

    num_copies     other devices that run the same with other sequences, as many times n
    local_steps    steps of a device between two sums of local SGD
    """

    price_cache: PriceCache
    num_devices: int
    micro_batch_size: int
    num_copies: int = 1
    local_steps: int = 1

    @property
    def num_micro_batches(self) -> int:
        batch = self.price_cache.training.global_batch_size
        return batch // self.micro_batch_size // self.num_copies

    def layers(self) -> Iterator[tuple[LayerKey, int]]:
        """Yields the classes of layers and their numbers."""
        yield from Counter(self.price_cache.keys(0, self.price_cache.num_layers)).items()

    def products(self, micro_batch_size: int) -> Iterator[ProductBytes]:
        """Yields the products of a weight with one micro-batch."""
        width = self.price_cache.training.precision.num_bytes
        for kind, count in self.layers():
            for operator in self.price_cache.layer(kind, micro_batch_size).operators:
                if operator.kind is OperatorKind.MATMUL:
                    weight = max(operator.parameters, key=lambda each: each.num_elements)
                    yield ProductBytes(
                        operator.inputs[0].num_bytes,
                        width * weight.num_elements,
                        operator.outputs[0].num_bytes,
                        count,
                    )

    def pass_s(self, micro_batch_size: int) -> float:
        """Seconds of one micro-batch on one device."""
        return sum(
            count * self.price_cache.layer_time(kind, micro_batch_size, WHOLE, ()).total_s
            for kind, count in self.layers()
        )

    def saved_bytes(self, micro_batch_size: int) -> float:
        """Bytes that one device saves of one micro-batch, with the largest workspace."""
        sizes = [
            (count, self.price_cache.activations(kind, micro_batch_size, WHOLE, ()))
            for kind, count in self.layers()
        ]
        return sum(count * size.saved for count, size in sizes) + max(
            size.workspace for _, size in sizes
        )

    def states_bytes(self, ranks: int) -> float:
        """Bytes of the states over `ranks` devices, with a 16-bit copy of the parameters."""
        training = self.price_cache.training
        copied = training.precision is not Precision.FP32
        parameters = self.price_cache.num_trained_parameters if copied else 0
        ideal = self.price_cache.ideal_states(ranks)
        return sum(ideal) + training.precision.num_bytes * parameters / ranks

    def gathered_s(self, num_bytes: float, degree: int, stride: int) -> float:
        """Seconds to gather `num_bytes`, or to reduce and scatter them, over one axis."""
        return self._collective_s(Collective.ALL_GATHER, num_bytes, degree, stride)

    def summed_s(self, num_bytes: float, degree: int, stride: int) -> float:
        """Seconds to all-reduce `num_bytes` over one axis."""
        return self._collective_s(Collective.ALL_REDUCE, num_bytes, degree, stride)

    def _collective_s(self, kind: Collective, num_bytes: float, degree: int, stride: int) -> float:
        machine = self.price_cache.machine
        ranks = self.num_devices * self.num_copies
        where = place_axis(degree, stride, ranks, machine.cluster.gpus_per_node)
        return collective_time(kind, num_bytes, where, machine).value_s

    def divided(self, comm_s: float, sent_bytes: float) -> SchemeCost:
        """Returns the cost of a scheme that divides everything over all devices.

        comm_s, sent_bytes    of one micro-batch
        """
        b, n = self.micro_batch_size, self.num_devices
        return SchemeCost(
            compute_s=self.num_micro_batches * self.pass_s(b) / n,
            comm_s=self.num_micro_batches * comm_s,
            sent_bytes=self.num_micro_batches * sent_bytes,
            states_bytes=self.states_bytes(n),
            activation_bytes=self.saved_bytes(b) / n,
        )


Formula = Callable[[SchemeCase], SchemeCost]


def _root(number: int, power: int, scheme: str) -> int:
    root: int = round(number ** (1 / power))
    if math.prod([root] * power) != number:
        shape = " x ".join("q" * power)
        raise ConfigError(f"{scheme} needs {shape} devices, there are {number}")
    return root


def parameter_server(case: SchemeCase) -> SchemeCost:
    """Data parallelism whose workers send gradients to one server and receive parameters."""
    n, training = case.num_devices, case.price_cache.training
    parameters = case.price_cache.num_trained_parameters
    sent = training.gradient_precision.num_bytes * parameters
    received = training.precision.num_bytes * parameters
    nic = case.price_cache.machine.cluster.nic
    return _whole_copies(
        case,
        comm_s=n * max(sent, received) / nic.bytes_per_s + 2 * nic.latency_s,
        sent_bytes=sent,
    )


def asynchronous_server(case: SchemeCase) -> SchemeCost:
    """A parameter server whose workers never wait for one another, so that gradients are stale.

    The server serves a worker while the others compute: a step takes the longer of both.
    """
    cost = parameter_server(case)
    return replace(cost, comm_s=max(0.0, cost.comm_s - cost.compute_s))


def local_sgd(case: SchemeCase) -> SchemeCost:
    """Data parallelism that averages the fp32 parameters after several local steps.

    The cost is that of one step, with its share of the sum.
    """
    n, steps = case.num_devices, case.local_steps
    averaged = FP32_BYTES * case.price_cache.num_trained_parameters
    return _whole_copies(
        case,
        comm_s=case.summed_s(averaged, n, 1) / steps,
        sent_bytes=2 * (n - 1) / n * averaged / steps,
    )


def _whole_copies(case: SchemeCase, *, comm_s: float, sent_bytes: float) -> SchemeCost:
    """Returns the cost of a scheme in which each device has the whole model."""
    b = case.micro_batch_size // case.num_devices
    return SchemeCost(
        compute_s=case.num_micro_batches * case.pass_s(b),
        comm_s=comm_s,
        sent_bytes=sent_bytes,
        states_bytes=case.states_bytes(1),
        activation_bytes=case.saved_bytes(b),
    )


def with_copies(cost: SchemeCost, case: SchemeCase, parts: int) -> SchemeCost:
    """Adds the all-reduce of gradients over the copies of a model in `parts` parts."""
    training, d = case.price_cache.training, case.num_copies
    parameters = case.price_cache.num_trained_parameters / parts
    summed = training.gradient_precision.num_bytes * parameters
    return replace(
        cost,
        comm_s=cost.comm_s + case.summed_s(summed, d, case.num_devices),
        sent_bytes=cost.sent_bytes + 2 * (d - 1) / d * summed,
    )


def tensor_25d(case: SchemeCase) -> SchemeCost:
    """Products on several equal squares of devices, each with its part of the batch.

    One square, which is 2-D tensor parallelism, where the devices do not make several.
    """
    n = case.num_devices
    depths = [d for d in (*range(2, n), 1) if n % d == 0 and math.isqrt(n // d) ** 2 == n // d]
    squares = [d for d in depths if case.micro_batch_size % d == 0]
    if not squares:
        raise ConfigError(
            f"2.5-D tensor parallelism needs q x q x d of {n} devices with d that divides the "
            f"micro-batch of {case.micro_batch_size}"
        )
    return _summa(case, math.isqrt(n // squares[0]), squares[0])


def _summa(case: SchemeCase, side: int, depth: int) -> SchemeCost:
    comm_s = sent = summed_s = summed = 0.0
    for each in case.products(case.micro_batch_size):
        x, w = each.inputs / side / depth, each.weight / side
        once_s = case.gathered_s(x, side, 1) + case.gathered_s(w, side, side)
        comm_s += each.count * (1 + BACKWARD) * once_s
        sent += each.count * (1 + BACKWARD) * (x + w) * (side - 1) / side
        own = each.weight / side**2
        summed_s += each.count * case.summed_s(own, depth, side**2)
        summed += each.count * 2 * own * (depth - 1) / depth
    cost = case.divided(comm_s, sent)
    cost = replace(
        cost,
        comm_s=cost.comm_s + summed_s,
        sent_bytes=cost.sent_bytes + summed,
        states_bytes=case.states_bytes(side**2),
    )
    return with_copies(cost, case, side**2)


def tensor_3d(case: SchemeCase) -> SchemeCost:
    """Products on a cube of devices."""
    side = _root(case.num_devices, 3, "3-D tensor parallelism")
    comm_s = sent = 0.0
    for each in case.products(case.micro_batch_size):
        parts = [tensor / side**2 for tensor in (each.inputs, each.weight, each.outputs)]
        once_s = sum(case.gathered_s(part, side, side**axis) for axis, part in enumerate(parts))
        comm_s += each.count * (1 + BACKWARD) * once_s
        sent += each.count * (1 + BACKWARD) * sum(parts) * (side - 1) / side
    return with_copies(case.divided(comm_s, sent), case, case.num_devices)
