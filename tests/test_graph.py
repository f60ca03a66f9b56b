"""The graph as data: complete, wired as the jaxpr is, and drawn so that one can read it."""

import collections
import dataclasses
import functools
import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.extend.core import Literal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from conftest import PROGRAMS
from funcgrad._compat import is_body, open_jaxpr, scan_arity
from funcgrad._graph import _text
from funcgrad._graph._place import place
from programs import programs

X = jnp.ones((2, 3))
W = jnp.ones((3, 3))
float0 = jax.dtypes.float0
NO_BACKWARD = ()  # argnums of a graph of the plain program


def operations(nodes):
    return sorted(node.operation for node in nodes if not node.is_end)


def named(nodes, operation):
    return [node for node in nodes if node.operation == operation]


def layers(ws, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0].sum()


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, (x, 3 * x**2)), lambda res, g: (g * res[1],))


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda x, t: (soft(*x), t[0] * jnp.exp(x[0])))


class Square(fg.Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


def kernel(x_ref, out_ref):
    out_ref[...] = jnp.sin(x_ref[...]) * 2


twice_sin = pl.pallas_call(
    kernel, out_shape=jax.ShapeDtypeStruct((2, 3), jnp.float32), grid=(4,), interpret=True
)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

FORMS = {
    "jit in jit": lambda x: jax.jit(lambda h: jax.jit(jnp.sin)(h) * h)(x @ W).sum(),
    "scan": lambda x: layers(jnp.ones((5, 3, 3)), x),
    "scan in scan": lambda x: lax.scan(
        lambda h, _: (lax.scan(lambda h, _: (jnp.sin(h), h), h, length=3)[0], None), x, length=4
    )[0].sum(),
    "scan of one round": lambda x: lax.scan(lambda c, w: (c * w, c), x, jnp.ones((1, 2, 3)))[
        0
    ].sum(),
    "rotation": lambda x: lax.scan(
        lambda c, _: ((jnp.sin(c[1]), c[0]), c[0]), (x, 2 * x), length=4
    )[1].sum(),
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda _, h: jnp.sin(h @ W), x).sum(),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda h: h**3, x).sum(),
    "switch": lambda x: lax.switch(1, [jnp.sin, jnp.cos, jnp.zeros_like], x).sum(),
    "checkpoint": lambda x: jax.checkpoint(lambda h: jnp.sin(jnp.sin(h @ W)))(x).sum(),
    "named": lambda x: jax.checkpoint(
        lambda h: jnp.sin(checkpoint_name(jnp.sin(h), "kept")),
        policy=jax.checkpoint_policies.save_only_these_names("kept"),
    )(x).sum(),
    "custom rules": lambda x: (cubed(x) + soft(x)).sum(),
    "Function": lambda x: Square.apply(x).sum(),
    "shard_map": lambda x: jax.shard_map(
        lambda x: lax.psum(jnp.sin(x).sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )(x),
    "random": lambda x: (jax.random.normal(jax.random.key(0), x.shape) * x).sum(),
    "gradient": lambda x: (jax.grad(lambda x: jnp.sin(x).sum())(x) ** 2).sum(),
    "hooked": lambda x: fg.grad_hook(jnp.sin(x), lambda g: 2 * g).sum(),
    "complex": lambda x: jnp.abs(jnp.exp(1j * x)).sum(),
    "added at": lambda x: jnp.sin(x).at[np.array([0, 0])].add(x * x).sum(),
    "closed over": lambda x: (x @ np.ones((3, 2), np.float32)).sum(),
}


def check_consistent(graph):
    for i, node in enumerate(graph.nodes):
        assert node.id == i
        if node.parent is not None:
            assert graph.nodes[node.parent].holds
            assert graph.nodes[node.parent].part == node.part
    for edge in graph.edges:
        source, target = graph.nodes[edge.source], graph.nodes[edge.target]
        assert edge.output < len(source.outputs)
        assert edge.source < edge.target or edge.carried or target.holds
        assert (source.part, target.part) != ("backward", "forward")
        if (source.part, target.part) == ("forward", "backward"):
            assert source.saved or source.body.startswith("branches")
    assert graph.saved_bytes == sum(node.saved for node in graph.nodes)


@pytest.mark.parametrize("form", FORMS)
def test_a_program_of_each_form(form):
    graph = fg.graph(FORMS[form])(X)
    assert graph.backward and not graph.no_backward
    check_consistent(graph)
    check_edges(graph, FORMS[form], X)


@given(programs())
@settings(max_examples=PROGRAMS // 10)
def test_generated_programs(program):
    params, (x, t) = program.params(), program.inputs()
    graph = fg.graph(program.loss)(params, x, t)
    saved = fg.saved_tensors(program.loss)(params, x, t)
    assert [s.bytes for s in graph.saved] == [kept.bytes for kept in saved]
    check_consistent(graph)
    check_edges(graph, program.loss, params, x, t)
    check_drawing(graph)


def check_edges(graph, fun, *args):
    """Nodes and edges are those of the two programs, run on sets of places."""
    leaves, tree = jax.tree.flatten(args)
    there, (value, pull) = jax.make_jaxpr(
        lambda leaves: jax.vjp(fun, *jax.tree.unflatten(tree, leaves)), return_shape=True
    )(leaves)
    seeds = jax.tree.leaves(value)
    gradients = lambda pull, seed: [g for g in jax.tree.leaves(pull(seed)) if g.dtype != float0]
    back = jax.make_jaxpr(gradients)(pull, value)
    kept_types = [(x.shape, x.dtype) for x in jax.tree.leaves(pull)]
    assert [(s.value.shape, s.value.dtype) for s in graph.saved] == kept_types
    assert graph.saved_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    run = Unrolled()
    outs = run.program(there.jaxpr, [{("argument", i)} for i in range(len(leaves))])
    kept = [run.computed(places) for places in outs[len(seeds) :]]
    given = [places or {("constant", i)} for i, places in enumerate(kept)]
    given += [{("seed", i)} for i in range(len(seeds))]
    ends = {("output", i): places for i, places in enumerate(outs[: len(seeds)])}
    grads = run.program(back.jaxpr, given)
    ends |= {("gradient", i): places for i, places in enumerate(grads)}
    run.edges |= {(source, end, 0) for end, places in ends.items() for source in places}

    live = run.reaching([*ends, *(source[0] for places in kept for source in places)])
    made = [eqn for eqn in range(len(run.names)) if eqn in live]
    nodes = [node for node in graph.nodes if not node.is_end]
    assert [node.operation for node in nodes] == [run.names[eqn] for eqn in made]
    number = {eqn: node.id for eqn, node in zip(made, nodes, strict=True)}
    counts = collections.Counter()
    for node in graph.nodes:
        if node.is_end:
            number[node.operation, counts[node.operation]] = node.id
            counts[node.operation] += 1
    constant = lambda node: graph.nodes[node].operation == "constant"
    from_nodes = {(e.source, e.output, e.target, e.operand) for e in graph.edges}
    assert {edge for edge in from_nodes if not constant(edge[0])} == {
        (*_output(source, number), number[reader], operand)
        for source, reader, operand in run.edges
        if reader in number and source[0] != "constant"
    }


def _output(source, number):
    is_end = isinstance(source[0], str)
    return (number[source], 0) if is_end else (number[source[0]], source[1])


class Unrolled:
    """The oracle: programs run on sets of places, each the output of an equation or an end.

    Loops are unrolled, of a ``cond`` all branches are taken.
    """

    def __init__(self):
        self.names, self.edges, self.holder = [], set(), {}

    def program(self, jaxpr, inputs):
        return self._run(jaxpr, self._numbered(jaxpr, None), inputs)

    def computed(self, places):
        """What is kept by a branch that keeps something; the others fill their place."""
        fills = lambda made: (
            made[0] == "constant"
            or (isinstance(made[0], int) and self.names[made[0]] == "broadcast_in_dim")
        )
        return {made for made in places if not fills(made)} or places

    def reaching(self, roots):
        before = collections.defaultdict(set)
        for source, reader, _ in self.edges:
            before[reader].add(source if isinstance(source[0], str) else source[0])
        found, waiting = set(), list(roots)
        while waiting:
            at = waiting.pop()
            if at not in found and at is not None:
                found.add(at)
                waiting += [*before[at], self.holder.get(at)]
        return found

    def _numbered(self, jaxpr, holder):
        """A number for each equation, and those of the programs that it holds."""
        numbers = []
        for eqn in jaxpr.eqns:
            i = len(self.names)
            self.names.append(eqn.primitive.name)
            self.holder[i] = holder
            numbers.append((i, [self._numbered(inner, i) for inner in held(eqn)]))
        return numbers

    def _run(self, jaxpr, numbers, inputs):
        places = dict(zip(jaxpr.invars, inputs, strict=True))
        places |= {var: {("constant", str(var))} for var in jaxpr.constvars}
        read = lambda atom: set() if isinstance(atom, Literal) else places[atom]
        for eqn, (i, inner) in zip(jaxpr.eqns, numbers, strict=True):
            outs = self._equation(eqn, i, inner, [read(atom) for atom in eqn.invars])
            places.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _reads(self, i, operand, places):
        self.edges |= {(source, i, operand) for source in places}

    def _equation(self, eqn, i, inner, inputs):
        programs = held(eqn)
        name, params = eqn.primitive.name, eqn.params
        if not programs:
            for operand, places in enumerate(inputs):
                self._reads(i, operand, places)
            return [{(i, output)} for output in range(len(eqn.outvars))]
        if name == "scan":
            n_consts, n_carry = scan_arity(params)
            consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]
            stacks = [set() for _ in eqn.outvars[n_carry:]]
            for _ in range(params["length"]):
                given = [*consts, *carry, *inputs[n_consts + n_carry :]]
                outs = self._run(programs[0], inner[0], given)
                carry = outs[:n_carry]
                stacks = [a | b for a, b in zip(stacks, outs[n_carry:], strict=True)]
            return [*carry, *stacks]
        if name == "while":
            n_test, n_consts = params["cond_nconsts"], params["body_nconsts"]
            carry = found = inputs[n_test + n_consts :]
            for _ in range(3):
                (goes_on,) = self._run(programs[0], inner[0], [*inputs[:n_test], *carry])
                self._reads(i, len(inputs), goes_on)
                consts = inputs[n_test : n_test + n_consts]
                carry = self._run(programs[1], inner[1], [*consts, *carry])
                found = [a | b for a, b in zip(found, carry, strict=True)]
            return found
        if name == "cond":
            self._reads(i, 0, inputs[0])
            outs = [self._run(*both, inputs[1:]) for both in zip(programs, inner, strict=True)]
            return [set().union(*places) for places in zip(*outs, strict=True)]
        return self._run(programs[0], inner[0], inputs)


def held(eqn):
    """The programs among the parameters of an equation, but those that combine two numbers."""
    if eqn.primitive.name.startswith(("scatter", "reduce", "select_and", "pass_through")):
        return []
    if eqn.primitive.name == "while":
        return [open_jaxpr(eqn.params[key])[0] for key in ("cond_jaxpr", "body_jaxpr")]
    params = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_body)
    return [open_jaxpr(param)[0] for param in params if is_body(param)]


def check_drawing(graph):
    """No box overlaps another, nothing leaves its group, and wires lead down."""
    scene = dataclasses.replace(graph)._scene  # of its own: groups are opened

    def check(number, box):
        item = scene.items[number]
        inner = [(x, y, b) for x, y, b in box.slots.values() if b is not None]
        for i, (x, y, b) in enumerate(inner):
            assert 0 <= x and x + b.width <= box.width + 1e-6
            assert 0 <= y and y + b.height <= box.height + 1e-6
            for u, v, c in inner[:i]:
                apart = x >= u + c.width or u >= x + b.width
                assert apart or y >= v + c.height or v >= y + b.height
        if box.slots:
            for upper, lower, _ in scene.rows[number].links:
                assert box.row_bottom[upper] < box.slots[lower][1]
            for slot, (_, _, b) in box.slots.items():
                if b is not None:
                    check(scene.number[item.children[slot]], b)

    for item in scene.items:
        item.open = True
    for part in scene.parts:
        check(scene.number[part], place(scene, scene.number[part]))


def test_every_operation_and_every_wire_is_drawn():
    graph = fg.graph(FORMS["jit in jit"])(X)
    scene = graph._scene
    drawn = {item.node.id for item in scene.items if item.node is not None}
    left_out = [graph.nodes[i] for i in range(len(graph.nodes)) if i not in drawn]
    trivial = {"jit", "broadcast_in_dim", "transpose", "reshape", "constant"}
    assert {node.operation for node in left_out} <= trivial
    assert not any(node.saved for node in left_out if node.operation != "constant")


def test_a_node_has_types_line_name_and_way_to_it():
    def fun(w, x):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ w)  # the line of tanh
        with jax.named_scope("second"), jax.named_scope("inner"):
            return jax.jit(lambda h: checkpoint_name(h.astype(jnp.bfloat16), "half"))(h)

    graph = fg.graph(fun)(W, X)
    (tanh,) = named(graph.forward, "tanh")
    assert (tanh.outputs[0].shape, tanh.outputs[0].dtype, tanh.bytes) == ((2, 3), jnp.float32, 24)
    assert tanh.line.code.endswith("# the line of tanh")
    assert (tanh.path, [call.name for call in tanh.calls]) == ("first", ["first"])
    (half,) = [node for node in graph.forward if node.name == "half"]
    assert half.path == "second/inner" and str(half.outputs[0]) == "bf16[2,3]"
    assert half.bytes == 12
    back = [n for n in graph.backward if n.operation == "dot_general"]
    assert {n.path for n in back} == {"first"} and len(back) == 2
    assert {n.name for n in named(graph.backward, "gradient")} == {"w", "x"}
    assert [n.name for n in named(graph.forward, "argument")] == ["w", "x"]


def test_what_is_computed_for_the_backward_pass_alone_is_marked():
    graph = fg.graph(lambda x: jnp.sin(x).sum())(X)
    assert [n.operation for n in graph.forward if n.for_backward] == ["cos"]
    assert [graph.nodes[s.node].operation for s in graph.saved] == ["cos"]
    (cos,) = named(graph.forward, "cos")
    assert [n.operation for n in graph.readers(cos)] == ["mul"]
    assert graph.readers(cos)[0].part == "backward"
    assert [n.operation for n in graph.sources(graph.readers(cos)[0])] == [
        "cos",
        "broadcast_in_dim",
    ]


def test_what_nothing_reads_is_left_out():
    def fun(x):
        jnp.exp(x)
        jax.debug.callback(lambda x: None, jnp.cos(x))  # an effect is read
        return jnp.sin(x).sum()

    found = operations(fg.graph(fun, argnums=NO_BACKWARD)(X).nodes)
    assert found == ["cos", "debug_callback", "reduce_sum", "sin"]


def test_flops_are_those_of_the_formulas():
    m, k, n = 5, 7, 3
    graph = fg.graph(lambda a, b: a @ b)(jnp.ones((m, k)), jnp.ones((k, n)))
    assert graph.flops("forward") == 2 * m * k * n
    assert graph.flops("backward") == 2 * graph.flops("forward")

    def batched(a, b):
        return jnp.einsum("bij,bjk->bik", a, b)

    graph = fg.graph(batched)(jnp.ones((4, m, k)), jnp.ones((4, k, n)))
    assert graph.flops("forward") == 4 * 2 * m * k * n

    moved = fg.graph(lambda x: jnp.concatenate([x.T, x.T])[:2].reshape(-1))(X)
    assert moved.flops("forward") == 0
    assert fg.graph(lambda x: jnp.tanh(x).sum())(X).flops("forward") == 6 + 6 + 6  # and 1 - tanh


@pytest.mark.parametrize("stride, padding, groups", [(1, "VALID", 1), (2, "SAME", 2)])
def test_flops_of_a_convolution_are_those_that_xla_counts(stride, padding, groups):
    def conv(x, w):
        dims = ("NHWC", "HWIO", "NHWC")
        strides = (stride, 1)
        return lax.conv_general_dilated(
            x, w, strides, padding, dimension_numbers=dims, feature_group_count=groups
        )

    x, w = jnp.ones((2, 8, 8, 6)), jnp.ones((3, 3, 6 // groups, 10))
    graph = fg.graph(conv)(x, w)
    assert graph.flops("forward") == jax.jit(conv).lower(x, w).cost_analysis()["flops"]
    assert graph.flops("backward") == 2 * graph.flops("forward")


S = jnp.eye(4)
POOL = ((1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@pytest.mark.parametrize(
    "fun, arg, expected",
    [
        (lambda x: lax.reduce_window(x, 0.0, lax.add, *POOL), jnp.ones((1, 4, 4, 3)), 48),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *POOL), jnp.ones((1, 4, 4, 3)), 48),
        (lambda x: lax.ragged_dot(x, jnp.ones((2, 4, 3)), jnp.array([1, 3])), S, 2 * 4 * 4 * 3),
        (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), jnp.ones((2, 6, 6)), 2 * 72),
        (lambda x: lax.linalg.lu(x)[0], jnp.ones((6, 3)), 6 * 9 - 9),
        (lambda x: lax.linalg.triangular_solve(x, S[:, :2], left_side=True), S, 4 * 4 * 2),
        (lambda x: lax.fft(x, "FFT", (8,)), jnp.ones((3, 8), jnp.complex64), 3 * 5 * 8 * 3),
        (lambda x: lax.fft(x, "RFFT", (8,)), jnp.ones((3, 8)), 3 * 5 * 8 * 3 // 2),
        (lambda x: x.at[jnp.array([0, 0])].add(1.0), X, 6),  # none for the indices
        (lambda x: x.at[0].multiply(2.0), X, 3),
        (lambda x: (x[0].astype(int) + 1) * jnp.arange(3), X, 0),
        (lambda x: lax.complex(x, x).real + 1, X, 6),
    ],
)
def test_flops_of_other_operations(fun, arg, expected):
    assert fg.graph(fun, NO_BACKWARD)(arg).flops("forward") == expected


def test_loops_count_their_rounds_and_branches_the_dearest():
    graph = fg.graph(FORMS["scan in scan"])(X)
    (sin,) = named(graph.forward, "sin")
    inner = graph.nodes[sin.parent]
    outer = graph.nodes[inner.parent]
    assert (inner.operation, inner.rounds, outer.rounds) == ("scan", 3, 4)
    assert (sin.trips, inner.trips, outer.trips) == (12, 4, 1)
    (cos,) = named(graph.forward, "cos")
    assert (cos.trips, cos.bytes, cos.saved) == (12, 24, 12 * 24)
    assert outer.flops == 12 * (sin.flops + cos.flops)

    cond = lambda x: lax.cond(x.sum() > 0, lambda x: x @ W, lambda x: x + 1, x)
    graph = fg.graph(cond, NO_BACKWARD)(X)
    (held,) = named(graph.nodes, "cond")
    assert held.flops == 2 * 2 * 3 * 3
    assert {n.body for n in graph.nodes if n.parent == held.id} == {"branches[0]", "branches[1]"}
    with pytest.raises((ValueError, TypeError), match="'both'"):  # types are checked here
        graph.flops("both")
    none = fg.graph(lambda x: lax.scan(lambda h, _: (jnp.sin(h), h), x, length=0)[0], ())(X)
    assert none.flops("forward") == none._scene.parts[0].flops == 0
    # The index is read by the cond, the operand by what is inside.
    (index,) = graph.sources(held)
    assert index.operation == "convert_element_type"


def test_a_loop_leads_back_to_its_start():
    graph = fg.graph(FORMS["fori_loop"], NO_BACKWARD)(X)
    (dot,) = named(graph.nodes, "dot_general")
    from_sin = [e for e in graph.edges if e.target == dot.id and e.carried]
    assert [graph.nodes[e.source].operation for e in from_sin] == ["sin"]
    assert "argument" in {n.operation for n in graph.sources(dot)}


def test_a_while_has_no_known_count_and_no_way_back():
    fun = lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x).sum()
    graph = fg.graph(fun)(X)
    (mul,) = named(graph.forward, "mul")
    assert mul.trips is None and graph.nodes[mul.parent].rounds is None
    assert not graph.backward and "Reverse-mode" in graph.no_backward
    assert "no backward pass: ValueError: Reverse-mode" in str(graph)
    assert "no backward pass" in graph.svg() and "no backward pass" in graph.html()


def test_what_a_kernel_does_is_shown_but_not_wired():
    graph = fg.graph(lambda x: twice_sin(x).sum(), NO_BACKWARD)(X)
    (call,) = named(graph.nodes, "pallas_call")
    assert [n.operation for n in graph.sources(call)] == ["argument"]
    assert [n.operation for n in graph.readers(call)] == ["reduce_sum"]
    (sin,) = named(graph.nodes, "sin")
    assert (sin.parent, sin.trips, call.rounds) == (call.id, 4, 4)
    assert call.flops == 4 * (6 + 6)


def test_programs_that_are_not_wired_are_drawn_and_only_what_runs_is_counted():
    solve = lambda _, b: b / 3
    once = lax.composite(lambda x: jnp.sin(x), "test.sin")
    fun = lambda x: once(lax.custom_linear_solve(lambda x: 3 * x, x, solve, solve))
    graph = fg.graph(fun, NO_BACKWARD)(X)
    assert operations(graph.nodes) == ["composite", "custom_linear_solve", "div", "sin"]
    assert graph.flops("forward") == 12
    check_drawing(graph)
    assert operations(fg.graph(lambda x: (twice_sin(x), x + 1)[1], NO_BACKWARD)(X).nodes) == ["add"]


def test_combining_two_numbers_is_no_program_of_its_own():
    graph = fg.graph(lambda x: x.at[np.array([0, 0])].add(x), NO_BACKWARD)(X)
    (added,) = [n for n in graph.nodes if n.operation == "scatter-add"]
    assert not added.holds
    assert "argument" in [n.operation for n in graph.sources(added)]


@pytest.mark.parametrize(
    "fun, args, said",
    [
        (lambda i: i + 1, (jnp.arange(3),), "no argument that is differentiated is floating"),
        (lambda x: jnp.argmax(x), (X,), "no output is floating"),
        (lambda: 1.0, (), "no argument that is differentiated is floating"),
        (lambda: None, (), "no argument that is differentiated is floating"),
        (lambda x, mode: x * 2 if mode == "twice" else x, (X, "twice"), "not a valid JAX type"),
        (fg.inference_mode(lambda x: jnp.sin(x).sum()), (X,), "inference_mode"),
        (lambda k: jax.random.split(k), (jax.random.key(0),), "no argument"),
    ],
)
def test_what_has_no_derivative_has_a_forward_part_alone(fun, args, said):
    graph = fg.graph(fun)(*args)
    assert not graph.backward and graph.saved_bytes == 0
    assert said in graph.no_backward
    check_consistent(graph)
    check_drawing(graph)
    ElementTree.fromstring(graph.svg())


def test_integers_keys_flags_and_auxiliary_outputs_are_left_alone():
    def fun(params, key, flag, *, scale):
        y = params["w"] * jax.random.normal(key, (3,)) if flag else params["w"]
        return (y * scale).sum(), {"count": params["n"] + 1}

    params = {"w": jnp.ones(3), "n": jnp.arange(2)}
    graph = fg.graph(fun, has_aux=True, argnums=0)(params, jax.random.key(0), True, scale=X[0])
    assert [n.name for n in named(graph.backward, "gradient")] == ["params['w']"]
    assert {n.name for n in named(graph.forward, "argument")} == {
        "params['w']",
        "params['n']",
        "key",
        "scale",
    }
    assert len(named(graph.forward, "output")) == 2 and len(named(graph.backward, "seed")) == 1
    with pytest.raises(ValueError, match="graph: argnums are positions among the 1 arguments"):
        fg.graph(jnp.sin, argnums=1)(X)


def test_outputs_that_are_inputs_literals_or_given_twice():
    def fun(x):
        y = jnp.sin(x)
        return {"x": x, "one": 1.0, "y": y, "again": y}

    graph = fg.graph(fun)(X)
    outputs = {
        n.name: [s.operation for s in graph.sources(n)] for n in named(graph.forward, "output")
    }
    assert outputs == {"['again']": ["sin"], "['one']": [], "['x']": ["argument"], "['y']": ["sin"]}
    check_drawing(graph)


def test_values_have_the_types_that_the_program_has():
    i, tangent = np.arange(2, dtype=np.int64), np.zeros(3, float0)
    graph = fg.graph(lambda x, y, i, t: x[i].sum() * y)(np.ones(3), 2.0, i, tangent)
    found = [str(n.outputs[0]) for n in named(graph.forward, "argument")]
    assert found == ["f32[3]", "f32[]", "i32[2]", "f0[3]"]
    assert named(graph.forward, "argument")[3].bytes == 0


def test_numbers_stand_where_they_are_read():
    graph = fg.graph(lambda x: ((1 - x) * (x - 1)).sum() * 3)(X)
    assert [n.detail for n in named(graph.forward, "sub")] == ["1,·", "1"]
    assert [n.detail for n in named(graph.forward, "constant")] == ["3"]


def test_what_jax_adds_by_itself_is_on_no_line():
    graph = fg.graph(lambda x: (x, x))(X)  # the sum of two cotangents
    assert [(n.operation, n.line) for n in graph.backward if not n.is_end] == [("add_any", None)]


def test_shapes_are_enough():
    shape = jax.ShapeDtypeStruct((10**6, 10**3), jnp.bfloat16)  # 2 GB, nowhere allocated
    graph = fg.graph(lambda x: jnp.sin(x).sum())(shape)
    assert graph.saved_bytes == 2 * 10**9
    assert "1.86 GiB" in str(graph)
    assert repr(graph).startswith("Graph('function': 13 nodes, ")
    (b,) = export.symbolic_shape("b")
    with pytest.raises(TypeError, match=r"graph: sizes are numbers; got x of shape \(b, 3\)"):
        fg.graph(lambda x: x)(jax.ShapeDtypeStruct((b, 3), jnp.float32))


def test_it_can_be_read_inside_other_transformations():
    seen = []

    def fun(x):
        seen.append(fg.graph(lambda y: jnp.sin(x * y).sum())(x))
        return x.sum()

    jax.jit(jax.grad(fun))(X)
    jax.vmap(fun)(X)
    assert [operations(graph.backward)[-1] for graph in seen] == ["mul", "mul"]
    assert seen[0].saved_bytes == 2 * 24


# Drawings.


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x))
        return x + nn.Dense(4)(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


def plain_block(params, x):
    with jax.named_scope("attention"):
        w = jax.nn.softmax((x @ params["q"]) @ (x @ params["k"]).T)
        x = x + w @ x
    with jax.named_scope("mlp"):
        return x + jnp.tanh(x @ params["up"]) @ params["down"]


T = jnp.ones((3, 4))


@functools.cache
def of_linen():
    block = Block()
    params = jax.eval_shape(block.init, jax.random.key(0), T)
    return fg.graph(lambda params, x: block.apply(params, x).sum())(params, T)


@functools.cache
def of_nnx():
    return fg.graph(lambda model, x: model(x).sum())(
        nnx.eval_shape(lambda: NnxBlock(nnx.Rngs(0))), T
    )


@functools.cache
def of_plain():
    shapes = {"q": (4, 4), "k": (4, 4), "up": (4, 8), "down": (8, 4)}
    params = {k: jax.ShapeDtypeStruct(shape, np.float32) for k, shape in shapes.items()}

    def loss(params, x):
        with jax.named_scope("layer_0"):
            return plain_block(params, x).sum()

    return fg.graph(loss)(params, T)


def labels(graph, part=0):
    return [i.label for i in graph._scene.items if i.children and i in below_part(graph, part)]


def below_part(graph, part):
    found, waiting = set(), [graph._scene.parts[part]]
    while waiting:
        item = waiting.pop()
        found.add(item)
        waiting += item.children
    return found


@pytest.mark.parametrize(
    "make, forward",
    [
        (
            of_linen,
            ["Block", "LayerNorm_0", "attention", "query", "key", "value", "out", "Dense_0"],
        ),
        (of_nnx, ["NnxBlock", "norm: LayerNorm", "up: Linear", "down: Linear"]),
        (of_plain, ["layer_0", "attention", "mlp"]),
    ],
)
def test_a_block_is_grouped_by_its_modules(make, forward):
    graph = make()
    check_consistent(graph)
    shown = " ".join(labels(graph))
    assert [name for name in forward if name not in shown] == []
    back = " ".join(labels(graph, part=1))
    assert [name for name in forward if name not in back] == []
    check_drawing(graph)


def test_a_module_is_named_where_its_parameters_are_read():
    class Outer(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jnp.sin(self.inner(x))

    graph = fg.graph(lambda model, x: model(x).sum())(nnx.eval_shape(Outer), X)
    (outer, inner) = [label for label in labels(graph) if "Outer" in label or "inner" in label]
    assert outer.endswith("Outer") and inner == "inner: Linear"


def test_a_module_called_twice_is_drawn_twice_and_in_order():
    def fun(w, x):
        def dense(h):
            with jax.named_scope("dense"):
                return h @ w

        return jnp.tanh(dense(jnp.tanh(dense(x)))).sum()

    graph = fg.graph(fun)(W, X)
    assert [name for name in labels(graph) if "dense" in name] == ["dense", "dense (2)"]
    check_drawing(graph)


def count_of_boxes(graph):
    return graph.svg().count('class="box"')


def test_many_layers_are_closed_and_long_programs_cut_into_pieces(monkeypatch):
    def fun(x):
        for i in range(4):
            with jax.named_scope(f"layer_{i}"):
                for _ in range(8):
                    x = jnp.sin(x) * x
        for _ in range(30):
            x = jnp.sin(x) * x
        return x

    graph = fg.graph(fun, NO_BACKWARD)(X)
    assert count_of_boxes(graph) < 50 < 120 < len(graph.nodes)
    assert len(str(graph).splitlines()) > 120
    monkeypatch.setattr(_text, "_MOST", 100)
    assert len(str(graph).splitlines()) < 60
    assert "layer_3" in graph.svg() and graph.html().count("layer_3") > 2
    assert any(re.match(r"1 of \d", label) for label in labels(graph))
    check_drawing(graph)


def test_text_and_drawing_are_the_same_every_time_and_hold_every_byte():
    first, again = (fg.graph(FORMS["cond"])(X) for _ in range(2))
    assert (str(first), first.svg(), first.html()) == (str(again), again.svg(), again.html())
    first = of_plain()
    text = str(first)
    assert text.startswith("loss: forward ")
    rows = [line for line in text.splitlines() if " matmul " in line]
    assert len(rows) == len([n for n in first.nodes if n.operation == "dot_general"])
    assert all("test_graph.py:" in row for row in rows)


def test_hostile_names_are_only_text():
    name = "a\x00\x1b</script><script>alert(1)</script><!--&\"']]>\u202e\n"

    def fun(params):
        with jax.named_scope(name):
            return jnp.sin(checkpoint_name(params[name] * 2, name)).sum()

    fun.__qualname__ = name
    graph = fg.graph(fun)({name: X, "other": X})
    root = ElementTree.fromstring(graph.svg().encode())
    assert any("<script>alert(1)" in (text.text or "") for text in root.iter())
    page = graph.html()
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "<!--&" not in page
    assert len([line for line in str(graph).splitlines() if "alert" in line]) >= 3


def test_the_page_asks_for_nothing_from_outside():
    page = of_plain().html()
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "default-src 'none'" in page


def test_it_is_saved_by_the_ending_of_the_name(tmp_path):
    graph = of_plain()
    for ending, start in ((".html", "<!DOCTYPE html>"), (".svg", "<svg"), (".txt", "loss:")):
        graph.save(tmp_path / f"graph{ending}")
        assert (tmp_path / f"graph{ending}").read_text(encoding="utf-8").startswith(start)
    with pytest.raises(ValueError, match=r"ends in .html, .svg, .txt; got 'graph.png'"):
        graph.save("graph.png")
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.title = "other"


def test_a_gradient_that_nothing_makes_and_a_leaf_that_nothing_reads():
    graph = fg.graph(lambda p: (lax.stop_gradient(p["a"]) * p["b"]).sum())({"a": X, "b": X, "c": X})
    (gradient_a,) = [n for n in named(graph.backward, "gradient") if n.name == "p['a']"]
    assert all(s.operation == "broadcast_in_dim" for s in graph.sources(gradient_a))
    check_drawing(graph)
