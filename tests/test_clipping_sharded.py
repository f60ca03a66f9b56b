"""One norm for one set of gradients, however they lie on the devices."""

import contextlib
import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from funcgrad._jaxpr import walk

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@functools.cache
def make_mesh(shape=(4, 2), kind=AUTO):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def collectives(fun, *args):
    names = [visit.eqn.primitive.name for visit in walk(jax.make_jaxpr(fun)(*args))]
    return [name for name in names if name.startswith(("psum", "pmax", "pmin", "all_"))]


def mixed():
    """A leaf in parts over eight devices, one in parts over two, and one copied to all."""
    tree = {"both": np.arange(8.0), "model": np.array([1.0, 3.0]), "none": np.array([2.0, 1.0])}
    specs = {"both": P(("data", "model")), "model": P("model"), "none": P()}
    return jax.tree.map(np.float32, tree), specs


def numpy_norm(tree, order=2):
    entries = [np.abs(np.asarray(x, np.complex128)).ravel() for x in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(entries), order)


COPIED = P()


def shard(fun, specs, out_specs=COPIED, mesh=None, check_vma=True):
    mesh = mesh or make_mesh()
    return jax.jit(
        jax.shard_map(fun, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=check_vma)
    )


def numpy_clip(tree, max_norm, order=2):
    scale = min(1, max_norm / numpy_norm(tree, order))
    return jax.tree.map(lambda x: np.asarray(x) * scale, tree)


def assert_close(got, expected, rtol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), got, expected)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_what_is_huge_or_tiny_is_summed_again_on_every_sharding(kind):
    tree, specs = mixed()
    mesh = make_mesh(kind=kind)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    norm = jax.jit(fg.global_norm)
    for size in (1e25, 1e-25, 1e-42):
        scaled = {name: np.float32(x * size) for name, x in tree.items()}
        with jax.set_mesh(mesh) if kind == EXPLICIT else contextlib.nullcontext():
            got = np.float64(np.asarray(norm(jax.tree.map(place, scaled, specs))))
        np.testing.assert_allclose(got, numpy_norm(scaled), rtol=1e-3 if size < 1e-30 else 1e-6)


def test_the_mixed_case_is_12_49_and_not_14_28():
    tree = {"parts": np.float32([6, 6, 6, 0]), "copy": np.full(3, 4, np.float32)}
    norm = shard(fg.global_norm, {"parts": P("data"), "copy": P()}, mesh=make_mesh((2,)))(tree)
    np.testing.assert_allclose(norm, math.sqrt(156), rtol=1e-6)  # not the root of 204


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, math.inf, -math.inf])
@pytest.mark.parametrize("check_vma", [True, False])
def test_parts_are_added_and_copies_count_once_by_one_reduction(check_vma, order):
    tree, specs = mixed()
    stated = None if check_vma else specs
    fun = shard(lambda g: fg.global_norm(g, order=order, specs=stated), specs, check_vma=check_vma)
    np.testing.assert_allclose(fun(tree), numpy_norm(tree, order), rtol=1e-6)
    assert len(collectives(fun, tree)) == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_clipping_on_devices_is_clipping_of_the_whole(check_vma):
    tree, specs = mixed()
    stated = None if check_vma else specs

    def local(grads):
        return fg.clip_grad_norm(grads, 1.5, specs=stated, nonfinite="zero")

    fun = shard(local, specs, fg.ClippedByNorm(specs, P()), check_vma=check_vma)
    clipped, norm = fun(tree)
    np.testing.assert_allclose(norm, numpy_norm(tree), rtol=1e-6)
    assert_close(clipped, numpy_clip(tree, 1.5))
    assert len(collectives(fun, tree)) == 1


def test_what_optax_does_inside_shard_map_differs_between_devices():
    tree, specs = mixed()
    local = lambda g: optax.tree.norm(g)[None]
    norms = shard(local, specs, P(("data", "model")))(tree)
    assert len(np.unique(np.asarray(norms).round(4))) > 1


def test_the_transformation_inside_shard_map():
    tree, specs = mixed()
    opt = optax.chain(fg.clip_by_total_norm(1.5), optax.sgd(1.0))

    def local(grads):
        updates, state = opt.update(grads, opt.init(grads), grads)
        return updates, state[0].norm

    updates, norm = shard(local, specs, (specs, P()))(tree)
    np.testing.assert_allclose(norm, numpy_norm(tree), rtol=1e-6)
    assert_close(updates, numpy_clip(tree, -1.5))


def test_without_types_specs_are_required():
    tree, specs = mixed()
    with pytest.raises(ValueError, match="nothing says which gradients are parts and which"):
        shard(fg.global_norm, specs, check_vma=False)(tree)


@pytest.mark.parametrize("wrong", [P("dta"), "data", NamedSharding(make_mesh(), P("data"))])
def test_without_types_specs_that_say_nothing_are_refused(wrong):
    # Read as a copy, a part would give each device the norm of what it has.
    norm = shard(lambda g: fg.global_norm(g, specs=wrong), P("data"), check_vma=False)
    with pytest.raises(
        (TypeError, ValueError), match="specs (are PartitionSpecs|name axes of the)"
    ):
        norm(np.arange(8, dtype=np.float32))


def test_with_types_wrong_specs_and_gradients_not_yet_reduced_are_named():
    tree, specs = mixed()
    stated = lambda g: fg.global_norm(g, specs=specs | {"none": P("data")})
    with pytest.raises(ValueError, match=r"varies over none with a spec over 'data'"):
        shard(stated, specs)(tree)

    def not_reduced(g):
        local = {**g, "none": g["none"] * lax.axis_index("data")}
        return fg.global_norm(local, specs=specs)

    with pytest.raises(ValueError, match=r"\['none'\] that varies over 'data' .*\(psum\)"):
        shard(not_reduced, specs)(tree)
    np.testing.assert_allclose(
        shard(lambda g: fg.global_norm(g, specs=specs), specs)(tree), numpy_norm(tree), rtol=1e-6
    )


def test_frozen_leaves_do_not_widen_the_reduction():
    tree, specs = mixed()
    fun = shard(lambda g: fg.global_norm(g, frozen="both"), specs)
    np.testing.assert_allclose(fun(tree), np.sqrt(15), rtol=1e-6)
    (psum,) = [v.eqn for v in walk(jax.make_jaxpr(fun)(tree)) if "psum" in v.eqn.primitive.name]
    assert psum.params["axes"] == ("model",)


def test_large_parts_neither_overflow_nor_vanish():
    tree = {"big": jnp.full(8, 1e30), "none": jnp.full(2, 1e30), "small": jnp.full(2, 1e-42)}
    specs = {"big": P("data"), "none": P(), "small": P("model")}
    np.testing.assert_allclose(shard(fg.global_norm, specs)(tree), math.sqrt(10) * 1e30, rtol=1e-6)
    small = {"small": jnp.full(8, 1e-40)}
    norm = shard(fg.global_norm, {"small": P("data")})(small)
    np.testing.assert_allclose(np.float64(np.asarray(norm)), math.sqrt(8) * 1e-40, rtol=1e-4)


def test_the_derivative_inside_shard_map_is_that_of_the_whole():
    tree, specs = mixed()
    loss = lambda g: fg.global_norm(g) ** 2 + jnp.sin(fg.global_norm(g))
    derivatives = lambda g: (jax.grad(loss)(g), jax.jvp(loss, (g,), (g,))[1])
    expected, dot = jax.jit(derivatives)(tree)

    grads, dot_of_parts = shard(derivatives, specs, (specs, P()))(tree)
    assert_close(grads, expected, rtol=1e-5)
    np.testing.assert_allclose(dot_of_parts, dot, rtol=1e-5)


@pytest.mark.parametrize("order", [3, math.inf])
def test_so_it_is_for_other_orders(order):
    tree = {"parts": np.float32([1, -4, 4, 2]), "copy": np.float32([4, 3])}
    specs = {"parts": P("data"), "copy": P()}
    grad = jax.grad(functools.partial(fg.global_norm, order=order))
    got = shard(grad, specs, specs, mesh=make_mesh((2,)))(tree)
    assert_close(got, jax.jit(grad)(tree), rtol=1e-5)


def test_without_types_there_is_no_derivative():
    tree, specs = mixed()
    grad = jax.grad(lambda g: fg.global_norm(g, specs=specs))
    with pytest.raises(ValueError, match="with check_vma=False it has no derivative"):
        shard(grad, specs, specs, check_vma=False)(tree)


def test_vmap_inside_shard_map_gives_the_samples_norms():
    rows = {"w": jnp.arange(24.0).reshape(3, 8), "b": jnp.ones((3, 2))}
    specs = {"w": P(None, "data"), "b": P()}
    norms = shard(jax.vmap(fg.global_norm), specs)(rows)
    each = [numpy_norm(jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(3)]
    np.testing.assert_allclose(norms, each, rtol=1e-6)


def test_axes_that_are_not_manual_are_left_to_the_compiler():
    tree = {"w": jnp.arange(8.0), "b": jnp.ones(2)}
    specs = {"w": P("data"), "b": P()}
    mesh = make_mesh()
    placed = jax.device_put(tree, NamedSharding(mesh, P("model")))
    fun = jax.shard_map(
        fg.global_norm, mesh=mesh, in_specs=(specs,), out_specs=P(), axis_names={"data"}
    )
    np.testing.assert_allclose(jax.jit(fun)(placed), numpy_norm(tree), rtol=1e-6)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize(("how", "order"), [("eager", 2), ("jit", 2), ("jit", math.inf)])
def test_sharded_arrays_give_the_norm_of_the_whole(how, kind, order):
    tree, specs = mixed()
    mesh = make_mesh(kind=kind)
    placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)
    clip = lambda g: fg.clip_grad_norm(g, 1.5, order=order)
    clip = jax.jit(clip) if how == "jit" else clip
    for context in (False, True):
        with jax.set_mesh(mesh) if context else contextlib.nullcontext():
            clipped, norm = clip(placed)
        np.testing.assert_allclose(norm, numpy_norm(tree, order), rtol=1e-6)
        assert_close(clipped, numpy_clip(tree, 1.5, order))
        for name, g in clipped.items():
            assert g.sharding.is_equivalent_to(placed[name].sharding, g.ndim)


@pytest.mark.parametrize(
    ("specs", "n_sets"),
    [
        ([P("data"), P(None, "data"), P("data"), P("data"), P(), P()], 1),
        ([P("data"), P(None, "data"), P("model"), P("model"), P(("data", "model")), P()], 3),
    ],
)
def test_under_jit_leaves_are_reduced_together_and_not_each_by_itself(specs, n_sets):
    tree = [np.ones((8, 8), np.float32) for _ in specs]
    spread = [NamedSharding(make_mesh(), spec) for spec in specs]
    clip = jax.jit(lambda g: fg.clip_grad_norm(g, 1.0), in_shardings=(spread,))
    text = clip.lower(tree).compile().as_text()
    main = text[text.index("\nENTRY") :]  # without the branch for subnormal norms
    assert main.count(" all-reduce(") == n_sets


def test_arrays_on_a_mesh_and_on_one_device_together():
    mesh = make_mesh(kind=EXPLICIT)
    grads = [jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data"))), jnp.array([2.0])]
    np.testing.assert_allclose(fg.global_norm(grads), numpy_norm(grads), rtol=1e-6)


_SPECS = [
    [P("data"), P()],
    [P("data", "model"), P("model"), P()],
    [P(("data", "model")), P("model", "data"), P("data")],
    [P(None, "model"), P(None, "data")],
]


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
@given(
    specs=st.sampled_from(range(len(_SPECS))),
    ends=st.tuples(st.integers(-120, 120), st.integers(-120, 120)),
    seed=st.integers(0, 2**16),
)
def test_random_trees_meshes_and_shardings(shape, specs, ends, seed):
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(min(ends), max(ends), (len(_SPECS[specs]), 8, 8))
    tree = [np.float32(np.exp2(x) * rng.choice([-1, 1], (8, 8))) for x in sizes]
    expected = numpy_norm(tree)
    got = _compiled(shape, specs)(tree)
    np.testing.assert_allclose(got, expected if expected < 3.4e38 else np.inf, rtol=1e-6)


@functools.cache
def _compiled(shape, specs):
    return shard(fg.global_norm, _SPECS[specs], mesh=make_mesh(shape))


TWO_PROCESSES = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
rank = int(sys.argv[1])
dist.init_process_group(
    "gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
    timeout=timedelta(seconds=60),
)
parts, copy = torch.arange(8.0)[4 * rank : 4 * rank + 4], torch.tensor([2.0, 1.0])
square = (parts**2).sum()
dist.all_reduce(square)
norm = torch.sqrt(square + (copy**2).sum())
scale = torch.clamp(1.5 / (norm + 1e-6), max=1.0)
print(*[float(x) for x in [norm, *(parts * scale), *(copy * scale)]])
dist.destroy_process_group()
"""


@pytest.mark.torch
def test_two_processes_of_torch_clip_to_the_same_gradients(tmp_path):
    run = lambda rank: subprocess.Popen(
        [sys.executable, "-c", TWO_PROCESSES, str(rank), str(tmp_path / "store")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    processes = [run(0), run(1)]
    try:
        outs = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outs
    (norm, *first), (norm_too, *second) = ([float(x) for x in out.split()] for out, _ in outs)

    tree = {"parts": jnp.arange(8.0), "copy": jnp.array([2.0, 1.0])}
    specs = {"parts": P("data"), "copy": P()}
    clip = shard(
        lambda g: fg.clip_grad_norm(g, 1.5, eps=1e-6), specs, fg.ClippedByNorm(specs, P()),
        mesh=make_mesh((2,)),
    )  # fmt: skip
    clipped, ours = clip(tree)
    np.testing.assert_allclose(ours, [norm, norm_too][0], rtol=1e-6)
    np.testing.assert_allclose(clipped["parts"], first[:4] + second[:4], rtol=1e-6)
    np.testing.assert_allclose(clipped["copy"], first[4:], rtol=1e-6)
