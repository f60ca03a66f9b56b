"""The lesson's schemes, past one process, and beside torch.distributed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcgrad as fg
from funcgrad import collectives as co

LESSON = Path(__file__).parents[1] / "examples" / "10_parallel_by_hand.py"
SECONDS = 240


def two_processes(code, *args, **environment):
    """Run a program in two processes that know their ranks; end both whatever happens."""
    own = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    run = lambda rank: subprocess.Popen(
        [sys.executable, "-c", code, str(rank), *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=own | environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
    )  # fmt: skip
    with run(0) as first, run(1) as second:
        processes = [first, second]
        try:
            outs = [process.communicate(timeout=SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], outs
    return [out for out, _ in outs]


def free_port():
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return held.getsockname()[1]


# Ends by itself, even where the other process has not come.
ON_TWO = f"""
import runpy, signal, sys
signal.alarm({SECONDS})
lesson = runpy.run_path({str(LESSON)!r})
names = ("jax", "jnp", "np", "fg", "P", "mesh_of", "draw")
globals().update({{name: lesson[name] for name in names}})
from jax.sharding import NamedSharding
assert jax.process_count() == 2 and len(jax.local_devices()) == 4

# Clipped per-sample gradients, with samples and parameters in parts at once.
mesh = mesh_of((4, 2), "data", "model")
params, x, y = [draw(8, 8), draw(8, 8)], draw(16, 8), draw(16, 8)
loss = lambda w, x, y: jnp.sum((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2)
def place(v, spec):
    return jax.make_array_from_callback(v.shape, NamedSharding(mesh, spec), lambda i: v[i])
clipped = jax.jit(fg.clipped_grad(loss, max_norm=0.5))
one = clipped(params, x, y)
assert np.median(one.norms) > 0.5
spread = [place(params[0], P(None, "model")), place(params[1], P("model"))]
many = clipped(spread, place(x, P("data")), place(y, P("data")))
copied = NamedSharding(mesh, P())
whole = jax.jit(lambda g: g, out_shardings=copied)(many.grads)
assert not many.grads[0].is_fully_addressable
for a, b in zip(one.grads, whole, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
print("all equal")

# What is off is named.
step = lambda w, x: jax.lax.pmean(jax.grad(lambda w: (w * x).mean())(w), "data")
try:
    check = fg.assert_matches_unsharded(step, mesh_of(8, "data"), (P(), P("data")), argnums=())
    check(np.float32(1), np.arange(8, dtype=np.float32))
except AssertionError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def jax_on_two():
    return two_processes(
        ON_TWO, MASTER_ADDR=f"localhost:{free_port()}", JAX_PLATFORMS="cpu",
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    )  # fmt: skip


def test_the_lesson_and_clipped_sample_gradients_in_two_processes(jax_on_two):
    assert all("all equal" in out for out in jax_on_two)


def test_what_is_off_is_named_in_each_process(jax_on_two):
    assert all("is 8 times what it should be" in out for out in jax_on_two)


TORCH_ON_TWO = f"""
import signal, sys, torch, torch.distributed as dist
signal.alarm({SECONDS})
from datetime import timedelta
rank = int(sys.argv[1])
dist.init_process_group(
    "gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
    timeout=timedelta(seconds=60),
)

class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g

class G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, g):
        return g

count = torch.arange(24, dtype=torch.float64)
x = torch.sin(count[:6].reshape(2, 3)).requires_grad_()
a = torch.cos(count[:12].reshape(3, 4))[:, 2 * rank : 2 * rank + 2].clone().requires_grad_()
b = torch.sin(1 + count[:8].reshape(4, 2))[2 * rank : 2 * rank + 2].clone().requires_grad_()
torch.sin(G.apply(torch.tanh(F.apply(x) @ a) @ b)).sum().backward()
print(*[float(v) for g in (x.grad, a.grad, b.grad) for v in g.flatten()])
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_tensor_parallel_layer_has_the_gradients_of_two_processes_of_torch(
    check_vma, x64, torch_on_two
):
    count = jnp.arange(24.0)
    x = jnp.sin(count[:6].reshape(2, 3))
    a, b = jnp.cos(count[:12].reshape(3, 4)), jnp.sin(1 + count[:8].reshape(4, 2))

    def layer(x, a, b):
        h = jnp.tanh(co.copy(x, "tp") @ a)
        return jnp.sin(co.reduce(h @ b, "tp")).sum()

    specs = (P(), P(None, "tp"), P("tp"))
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    grads = jax.shard_map(
        jax.grad(layer, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma
    )
    ours = jax.jit(grads)(x, a, b)
    for rank, numbers in enumerate(torch_on_two):
        theirs = np.split(numbers, [6, 12])
        own = slice(2 * rank, 2 * rank + 2)
        for got, expected in zip((ours[0], ours[1][:, own], ours[2][own]), theirs, strict=True):
            np.testing.assert_allclose(np.ravel(got), expected, rtol=1e-12)
    fg.assert_matches_unsharded(layer, mesh, specs, check_vma=check_vma)(x, a, b)


@pytest.fixture(scope="module")
def torch_on_two(tmp_path_factory):
    outs = two_processes(TORCH_ON_TWO, str(tmp_path_factory.mktemp("gloo") / "store"))
    return [np.array([float(x) for x in out.split()]) for out in outs]


@pytest.mark.parametrize("check_vma", [True, False])
def test_experts_on_devices_send_tokens_there_and_back(check_vma):
    """Each device has two of eight experts, and a token for each of them."""
    tokens = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    experts = np.random.default_rng(1).normal(size=(8, 3, 3)).astype(np.float32)

    def loss(w, x):  # the i-th token of each eight goes to expert i
        sent = x.reshape(-1, 8, 3)
        come = co.all_to_all(sent, "ep", split_axis=1, concat_axis=0)
        done = jnp.tanh(jnp.einsum("nek,ekl->nel", come, w))
        back = co.all_to_all(done, "ep", split_axis=0, concat_axis=1)
        return co.reduce(jnp.sin(back.reshape(x.shape) * x).sum(), "ep")

    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    check = fg.assert_matches_unsharded(loss, mesh, (P("ep"), P("ep")), check_vma=check_vma)
    check(experts, tokens)
