"""Arrays and whole modules cross between torch and JAX without loss, in the right layout."""

import subprocess
import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from funcgrad.parity._bridge import grads_to_jax, grads_to_torch, to_jax, to_torch
from funcgrad.parity._flax_tree import flax_grads, flax_params

NARROW = ["bool", "uint8", "int16", "int32", "float16", "bfloat16", "float32", "complex64"]
WIDE = ["int64", "float64", "complex128"]


def some(shape, dtype, seed=0):
    """A torch tensor of any dtype with values that every dtype can hold."""
    values = np.random.default_rng(seed).integers(0, 100, shape)
    return torch.as_tensor(values).to(getattr(torch, dtype))


# Arrays


@pytest.mark.parametrize("dtype", [*NARROW, "float8_e4m3fn", *WIDE])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
@pytest.mark.parametrize("copy", [True, False])
def test_every_dtype_and_shape_goes_over_and_comes_back(dtype, shape, copy):
    tensor = some(shape, dtype)
    with jax.enable_x64(dtype in WIDE):
        array = to_jax(tensor, copy=copy)
        assert (array.dtype, array.shape) == (jnp.dtype(dtype), shape)
        back = to_torch(array, copy=copy)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))


@given(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(NARROW), st.booleans())
@settings(max_examples=25)
def test_trees_of_arrays_make_the_round_trip(shape, dtype, copy):
    tree = {"a": [some(shape, dtype), None], 3: (some(shape, dtype, 1), 2.5)}
    tree = {0: tree["a"], 3: tree[3]}
    back = to_torch(to_jax(tree, copy=copy), copy=copy)
    assert back[0][1] is None
    assert back[3][1] == 2.5
    for old, new in ((tree[0][0], back[0][0]), (tree[3][0], back[3][0])):
        assert old.dtype == new.dtype
        assert torch.equal(old, new)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[:, ::2],
        lambda t: t[1:, 1:],
        lambda t: t[:1].expand(4, 6),
        lambda t: t.flip(0),
        lambda t: t.requires_grad_() * 2,
        lambda t: torch.nn.Parameter(t),
        lambda t: (t + 1j * t).conj(),
        lambda t: (t + 1j * t).conj().imag,
    ],
)
@pytest.mark.parametrize("copy", [True, False])
def test_views_and_tensors_with_gradients_cross_by_value(view, copy):
    tensor = view(torch.arange(24.0).reshape(4, 6))
    expected = tensor.detach().resolve_conj().resolve_neg().numpy()
    np.testing.assert_array_equal(np.asarray(to_jax(tensor, copy=copy)), expected)


def test_numpy_arrays_cross_whatever_their_order():
    for array in (np.arange(4.0, dtype=">f4"), np.ones((2, 3), np.float32)[:, ::-1], np.float32(2)):
        np.testing.assert_array_equal(to_torch(array, copy=False).numpy(), array)
        np.testing.assert_array_equal(to_jax(array), array)


def test_an_update_in_torch_does_not_reach_a_copied_array():
    tensor = torch.arange(1000.0)
    array = to_jax({"w": tensor, "view": tensor[::2]})
    tensor += 1
    assert array["w"][0] == 0
    assert array["view"][1] == 2
    back = to_torch(array)
    back["w"] += 5
    assert array["w"][0] == 0


def test_without_copy_memory_is_shared():
    tensor = torch.arange(1000.0)
    array = to_jax(tensor, copy=False)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert to_torch(array, copy=False).data_ptr() == tensor.data_ptr()


def test_copied_arrays_mix_with_sharded_ones():
    assert not to_jax(torch.ones(3)).committed


def test_a_sharded_array_becomes_one_tensor():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.P("i"))
    array = jax.device_put(jnp.arange(8.0), spec)
    assert torch.equal(to_torch(array), torch.arange(8.0))


def test_64_bit_integers_narrow_only_when_their_values_allow_it():
    assert to_jax(torch.tensor([1, -(2**31)])).dtype == jnp.int32
    with pytest.raises(ValueError, match=r"to_jax: tree\['ids'\] would be rounded to int32; got i"):
        to_jax({"ids": torch.tensor([2**31])})


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_64_bit_floats_are_never_rounded_silently(dtype, copy):
    tree = {"a": [some((2,), dtype)]}
    with pytest.raises(ValueError, match=rf"tree\['a'\]\[0\] .* got {dtype}. Wrap .*enable_x64"):
        to_jax(tree, copy=copy)
    with pytest.raises(ValueError, match=f"got {dtype}"):
        to_jax(tree["a"][0].numpy(), copy=copy)


def test_what_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"to_jax: tree\['m'\] must be .*got Linear. .*state_dict"):
        to_jax({"m": torch.nn.Linear(2, 2)})
    with pytest.raises(TypeError, match=r"tree\[0\] must be a dense tensor.*to_dense"):
        to_jax([torch.eye(2).to_sparse()])
    with pytest.raises(TypeError, match="no data"):
        to_jax(torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match="numbers JAX has; got <U1"):
        to_jax(np.array(["x"]))
    with pytest.raises(TypeError, match="numbers JAX has; got"):
        to_jax(np.ones(2, np.longdouble))
    with pytest.raises(TypeError, match=r"to_torch: tree\['k'\].*PRNG keys.*key_data"):
        to_torch({"k": jax.random.key(0)})
    with pytest.raises(TypeError, match="got str"):
        to_torch(["x"])
    with pytest.raises(TypeError, match="dtype that torch has; got int4"):
        to_torch(jnp.zeros(2, "int4"))
    with pytest.raises(TypeError, match=r"must be a concrete array; got the tracer.*outside jit"):
        jax.jit(to_torch)(jnp.ones(2))


def test_complex_gradients_are_conjugates_of_each_other():
    z = torch.tensor([1 + 2j], requires_grad=True)
    (z.abs() ** 2).sum().backward()
    ours = jax.grad(lambda z: (jnp.abs(z) ** 2).sum())(jnp.array([1 + 2j]))
    assert z.grad is not None
    assert complex(z.grad[0]) == pytest.approx(2 + 4j)
    np.testing.assert_allclose(grads_to_jax([z.grad, None])[0], ours, rtol=1e-6)
    assert torch.allclose(grads_to_torch({"z": ours})["z"], z.grad)
    real = torch.tensor([3.0])
    assert grads_to_jax(real)[0] == 3


def test_importing_the_bridge_leaves_torch_alone():
    code = "import sys, funcgrad.parity._compare, funcgrad.parity._flax_tree; print(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'torch'" not in done.stdout


# Single layers: value and gradients in float64


def channels_last(t):
    return t.movedim(1, -1)


def torch_side(module, x, run):
    """The output, the gradients left in ``.grad``, and the weights of the loss."""
    x.requires_grad_()
    out = run(module, x)
    weights = torch.as_tensor(np.random.default_rng(5).normal(size=out.shape))
    module.zero_grad()
    (out * weights).sum().backward()
    return out.detach(), to_jax(weights)


def first(module, x):
    return module(x)


def check_linen(layer, module, x, run_torch=first, reshape=None, rename=None):
    """Value, input gradient and parameter gradients of a Linen layer against torch."""
    module, x = module.double(), x.double()
    template = jax.eval_shape(layer.init, jax.random.key(0), to_jax(x))
    params = flax_params(template, module, rename=rename)
    expected, weights = torch_side(module, x, run_torch)

    @jax.jit
    @partial(jax.grad, argnums=(0, 1), has_aux=True)
    def loss(trainable, x):
        out = layer.apply({**params, "params": trainable}, x).reshape(expected.shape)
        return (out * weights).sum(), out

    (grads, x_grad), out = loss(params["params"], to_jax(x))
    assert_trees_match(out, expected.numpy())
    assert_trees_match(x_grad, to_jax(x.grad))
    assert_trees_match(grads, flax_grads(template["params"], module, rename=rename))


def check_nnx(make, module, x, run_torch=first, rename=None):
    """Value, input gradient and parameter gradients of an NNX module against torch."""
    module, x = module.double(), x.double()
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    state = flax_params(model, module, rename=rename)
    params, others = nnx.split_state(state, nnx.Param, ...)
    graph = nnx.graphdef(model)
    rest = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.BatchStat)))
    expected, weights = torch_side(module, x, run_torch)

    @jax.jit
    @partial(jax.grad, argnums=(0, 1), has_aux=True)
    def loss(params, x):
        out = nnx.merge(graph, params, others, rest)(x)
        return (out * weights).sum(), out

    (grads, x_grad), out = loss(params, to_jax(x))
    assert_trees_match(out, expected.numpy())
    assert_trees_match(x_grad, to_jax(x.grad))
    assert_trees_match(grads, flax_grads(model, module, rename=rename))


def assert_trees_match(ours, expected):
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def rngs():
    return nnx.Rngs(0)


F64 = {"param_dtype": np.float64}


@pytest.fixture(autouse=True)
def torch_seed():
    torch.manual_seed(0)


def test_linear_matches_linen_and_nnx(x64):
    x = torch.randn(4, 7)
    check_linen(nn.Dense(3, **F64), torch.nn.Linear(7, 3), x)
    check_linen(nn.Dense(3, use_bias=False, **F64), torch.nn.Linear(7, 3, bias=False), x)
    check_nnx(lambda rngs: nnx.Linear(7, 3, rngs=rngs, **F64), torch.nn.Linear(7, 3), x)


def test_linear_fills_a_dense_layer_with_heads(x64):
    check_linen(
        nn.DenseGeneral((2, 3), **F64),
        torch.nn.Linear(7, 6),
        torch.randn(4, 7),
    )


CONVOLUTIONS = [
    # kernel, channels in and out, stride, dilation, padding, groups, bias
    ((3,), 4, 6, (2,), (1,), (2,), 1, True),
    ((2, 3), 4, 6, (1, 2), (2, 1), (1, 0), 2, True),
    ((3, 2), 3, 6, (1, 1), (1, 1), (0, 0), 3, False),
    ((2, 1, 3), 2, 4, (1, 1, 2), (1, 2, 1), (0, 1, 1), 1, True),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda c: f"{len(c[0])}d-groups{c[6]}")
def test_convolutions_match_with_stride_dilation_padding_and_groups(case, x64):
    kernel, c_in, c_out, stride, dilation, padding, groups, bias = case
    kind = getattr(torch.nn, f"Conv{len(kernel)}d")
    module = kind(c_in, c_out, kernel, stride, padding, dilation, groups, bias)
    options = {
        "kernel_size": kernel,
        "strides": stride,
        "kernel_dilation": dilation,
        "padding": [(p, p) for p in padding],
        "feature_group_count": groups,
        "use_bias": bias,
        **F64,
    }
    x = torch.randn(2, *(5 + n for n in range(len(kernel))), c_in)
    run = lambda module, x: channels_last(module(x.movedim(-1, 1)))
    if len(kernel) == 2:
        make = lambda rngs: nnx.Conv(c_in, c_out, rngs=rngs, **options)
        check_nnx(make, module, x, run)
    else:
        check_linen(nn.Conv(c_out, **options), module, x, run)


@pytest.mark.parametrize("dims", [1, 2])
def test_transposed_convolutions_match(dims, x64):
    kernel, stride, padding, output_padding, dilation = (3, 2), (2, 3), (1, 0), (1, 1), (1, 2)
    cut = lambda values: values[:dims]
    module = getattr(torch.nn, f"ConvTranspose{dims}d")(
        4,
        4,  # as many in as out: the shape alone would not tell a transposed kernel
        cut(kernel),
        cut(stride),
        cut(padding),
        cut(output_padding),
        dilation=cut(dilation),
    )
    sides = [
        (d * (k - 1) - p, d * (k - 1) - p + o)
        for k, p, o, d in zip(
            cut(kernel), cut(padding), cut(output_padding), cut(dilation), strict=True
        )
    ]
    options = {"strides": cut(stride), "kernel_dilation": cut(dilation), "padding": sides, **F64}
    x = torch.randn(2, *(4, 5)[:dims], 4)
    run = lambda module, x: channels_last(module(x.movedim(-1, 1)))
    check_linen(nn.ConvTranspose(4, cut(kernel), **options), module, x, run)
    flipped = {**options, "transpose_kernel": True}
    model = nnx.eval_shape(lambda: nnx.ConvTranspose(4, 4, cut(kernel), rngs=rngs(), **flipped))
    with pytest.raises(ValueError, match="transpose_kernel=True"):
        flax_params(model, module.double())


def test_embedding_matches_and_a_padding_index_only_loses_its_gradient(x64):
    ids = np.array([[0, 3, 3], [1, 0, 6]])
    module = torch.nn.Embedding(7, 4, padding_idx=0).double()
    variables = nn.Embed(7, 4, **F64).init(jax.random.key(0), ids)
    params = flax_params(variables, module)
    out = module(torch.as_tensor(ids))
    np.testing.assert_array_equal(nn.Embed(7, 4).apply(params, ids), out.detach())
    (out**2).sum().backward()
    ours = jax.grad(lambda v: (nn.Embed(7, 4).apply(v, ids) ** 2).sum())(params)
    assert_trees_match(ours, flax_grads(variables, module))  # row 0 is zero, so is its gradient
    (module(torch.as_tensor(ids)) * 3).sum().backward()
    assert not flax_grads(variables, module)["params"]["embedding"][0].any()


def test_normalisations_match(x64):
    x = torch.randn(3, 5, 8) * 3 + 1
    modules = torch.nn.LayerNorm(8), torch.nn.RMSNorm(8), torch.nn.GroupNorm(4, 8)
    for module in modules:  # away from the initial ones and zeros
        for p in module.parameters():
            torch.nn.init.normal_(p)
    layer, rms, group = modules
    check_linen(nn.LayerNorm(epsilon=1e-5, **F64), layer, x)
    check_nnx(lambda rngs: nnx.LayerNorm(8, epsilon=1e-5, rngs=rngs, **F64), layer, x)
    rms.eps = 1e-6
    check_linen(nn.RMSNorm(epsilon=1e-6, **F64), rms, x)
    run = lambda module, x: channels_last(module(x.movedim(-1, 1)))
    check_linen(nn.GroupNorm(4, epsilon=1e-5, **F64), group, x, run)


def test_layernorm_over_two_axes_matches(x64):
    module = torch.nn.LayerNorm((5, 8))
    torch.nn.init.normal_(module.weight)
    layer = nn.LayerNorm(epsilon=1e-5, reduction_axes=(-2, -1), feature_axes=(-2, -1), **F64)
    check_linen(layer, module, torch.randn(3, 5, 8))


def test_batchnorm_matches_with_its_running_statistics(x64):
    module = torch.nn.BatchNorm1d(8)
    module(torch.randn(16, 8) * 2 + 3)
    module.eval()
    check_linen(nn.BatchNorm(use_running_average=True, **F64), module, torch.randn(4, 8))
    make = lambda rngs: nnx.BatchNorm(8, use_running_average=True, rngs=rngs, **F64)
    check_nnx(make, module, torch.randn(4, 8))


def rows_first(output):
    return output[0]


CELLS = {"LSTM": nn.OptimizedLSTMCell, "GRU": nn.GRUCell, "RNN": nn.SimpleCell}


@pytest.mark.parametrize("cell", CELLS)
def test_recurrent_layers_match_linen(cell, x64):
    check_linen(
        nn.RNN(CELLS[cell](5, **F64)),
        getattr(torch.nn, cell)(3, 5, batch_first=True),
        torch.randn(2, 4, 3),
        run_torch=lambda module, x: module(x)[0],
    )


@pytest.mark.parametrize("cell", CELLS)
def test_cells_without_bias_get_zeros_and_have_no_gradient_for_them(cell, x64):
    module = getattr(torch.nn, f"{cell}Cell")(3, 5, bias=False).double()
    layer = CELLS[cell](5, **F64)
    x, h = torch.randn(2, 3).double(), torch.randn(2, 5).double()
    carry = (h, h) if cell == "LSTM" else h
    template = jax.eval_shape(layer.init, jax.random.key(1), to_jax(carry), to_jax(x))
    # torch has the carry (h, c), Flax (c, h)
    expected = module(x, carry)[0] if cell == "LSTM" else module(x, carry)
    _, ours = layer.apply(flax_params(template, module), to_jax(carry), to_jax(x))
    np.testing.assert_allclose(ours, expected.detach(), rtol=1e-10)
    expected.sum().backward()
    with pytest.raises(ValueError, match="Flax leaves without a value"):
        flax_grads(template, module)


class GRUWithBothBiases(nnx.GRUCell):
    def __init__(self, in_features, hidden_features, *, rngs):
        super().__init__(in_features, hidden_features, rngs=rngs, **F64)
        self.dense_h = nnx.Linear(hidden_features, 3 * hidden_features, rngs=rngs, **F64)


class FromZeros(nnx.RNN):
    def __call__(self, x):
        zeros = jnp.zeros((x.shape[0], self.cell.hidden_features), x.dtype)
        lstm = not isinstance(self.cell, nnx.GRUCell)
        return super().__call__(x, initial_carry=(zeros, zeros) if lstm else zeros)


@pytest.mark.parametrize("kind", ["LSTM", "OptimizedLSTM", "GRU"])
def test_recurrent_layers_match_nnx(kind, x64):
    cells = {
        "LSTM": lambda rngs: nnx.LSTMCell(3, 5, rngs=rngs, **F64),
        "OptimizedLSTM": lambda rngs: nnx.OptimizedLSTMCell(3, 5, rngs=rngs, **F64),
        "GRU": lambda rngs: GRUWithBothBiases(3, 5, rngs=rngs),
    }
    module = getattr(torch.nn, "GRU" if kind == "GRU" else "LSTM")(3, 5, batch_first=True)
    check_nnx(
        lambda rngs: FromZeros(cells[kind](rngs)),
        module,
        torch.randn(2, 4, 3),
        run_torch=lambda module, x: module(x)[0],
    )


def test_the_gru_bias_that_nnx_cannot_hold_is_refused_unless_it_is_zero(x64):
    module = torch.nn.GRUCell(3, 5).double()
    cell = nnx.GRUCell(3, 5, rngs=rngs(), **F64)
    with pytest.raises(ValueError, match=r"flax_params: this GRU cell .*cell.dense_h = nnx.Linear"):
        flax_params(cell, module)
    with torch.no_grad():
        module.bias_hh[10:] = 0
    nnx.update(cell, flax_params(cell, module))
    x, h = torch.randn(2, 3).double(), torch.randn(2, 5).double()
    np.testing.assert_allclose(cell(to_jax(h), to_jax(x))[0], module(x, h).detach(), rtol=1e-10)


class DeepBidirectional(nn.Module):
    def setup(self):
        one = lambda: nn.RNN(nn.GRUCell(4, **F64))
        self.gru = [nn.Bidirectional(one(), one()) for _ in range(2)]

    def __call__(self, x):
        for layer in self.gru:
            x = layer(x)
        return x


def test_layers_and_directions_of_a_recurrent_network_find_their_cells(x64):
    module = torch.nn.Module()
    module.gru = torch.nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    check_linen(
        DeepBidirectional(),
        module,
        torch.randn(2, 3, 3),
        run_torch=lambda module, x: module.gru(x)[0],
    )


@pytest.mark.parametrize("bias", [True, False])
def test_attention_matches_linen(bias, x64):
    module = torch.nn.MultiheadAttention(6, 3, bias=bias, batch_first=True)
    if bias:
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
    check_linen(
        nn.MultiHeadAttention(num_heads=3, use_bias=bias, **F64),
        module,
        torch.randn(2, 5, 6),
        run_torch=lambda module, x: module(x, x, x, need_weights=False)[0],
    )


def test_attention_with_other_key_and_value_sizes_matches(x64):
    module = torch.nn.MultiheadAttention(6, 2, kdim=4, vdim=5, batch_first=True).double()
    q, k, v = (torch.randn(2, 3, n).double() for n in (6, 4, 5))
    layer = nn.MultiHeadAttention(num_heads=2, qkv_features=6, out_features=6, **F64)
    arrays = to_jax((q, k, v))
    params = flax_params(jax.eval_shape(layer.init, jax.random.key(0), *arrays), module)
    np.testing.assert_allclose(
        jax.jit(layer.apply)(params, *arrays), module(q, k, v)[0].detach(), rtol=1e-10, atol=1e-12
    )


def attention_in_float64(query, key, value, **unused):
    # nnx.dot_product_attention takes its softmax in float32 whatever the inputs are.
    weights = nn.dot_product_attention_weights(query, key)
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


def test_attention_matches_nnx(x64):
    module = torch.nn.MultiheadAttention(6, 2, batch_first=True)
    torch.nn.init.normal_(module.in_proj_bias)
    check_nnx(
        lambda rngs: nnx.MultiHeadAttention(
            2, 6, decode=False, attention_fn=attention_in_float64, rngs=rngs, **F64
        ),
        module,
        torch.randn(2, 4, 6),
        run_torch=lambda module, x: module(x, x, x, need_weights=False)[0],
    )


# Whole models


class TorchModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(4))
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)
        )
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.net(x * self.scale)


class LinenModel(nn.Module):
    def setup(self):
        self.scale = self.param("scale", nn.initializers.ones, (4,), np.float64)
        self.net = nn.Sequential([nn.Dense(5, **F64), nn.tanh, nn.Dense(4, **F64)])
        self.blocks = [nn.Dense(4, **F64) for _ in range(2)]

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.net(x * self.scale)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        linear = lambda i, o: nnx.Linear(i, o, rngs=rngs, **F64)
        self.scale = nnx.Param(jnp.ones(4, np.float64))
        self.net = nnx.Sequential(linear(4, 5), jnp.tanh, linear(5, 4))
        self.blocks = nnx.List([linear(4, 4) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)  # its state is no parameter

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.net(x * self.scale)


class CompactModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = jnp.tanh(nn.Dense(4, **F64)(x))
        x = x * self.param("gain", nn.initializers.ones, (4,), np.float64)
        return nn.Dense(4, name="last", **F64)(jnp.tanh(nn.Dense(5, **F64)(x)))


def test_nested_modules_fill_by_name(x64):
    check_linen(LinenModel(), TorchModel(), torch.randn(3, 4))
    check_nnx(NNXModel, TorchModel(), torch.randn(3, 4))


def test_renamed_modules_fill_by_their_new_names(x64):
    rename = {
        "blocks.0": "Dense_0",
        "blocks.1": "Dense_1",
        "scale": "gain",
        "net.0": "Dense_2",
        "net.2": "last",
    }
    check_linen(CompactModel(), TorchModel(), torch.randn(3, 4), rename=rename)


def test_a_wrapper_is_renamed_away(x64):
    wrapped = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 3)}).double()
    variables = nn.Dense(3, **F64).init(jax.random.key(0), jnp.ones(2))
    filled = flax_params(variables, wrapped, rename={"module": ""})
    np.testing.assert_array_equal(filled["params"]["kernel"], wrapped["module"].weight.T.detach())


def test_names_without_partner_are_all_listed():
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(2, 3)})
    template = {"params": {"a": {"kernel": jnp.ones((2, 3))}, "c": {"bias": jnp.ones(3)}}}
    with pytest.raises(ValueError, match="every torch name needs a place") as caught:
        flax_params(template, module)
    for name in ("'a.bias'", "'b.weight'", "'b.bias'", "template['params']['c']['bias']"):
        assert name in str(caught.value)
    assert "'a.weight'" not in str(caught.value)


def test_shapes_that_differ_are_all_listed():
    template = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(4)}
    with pytest.raises(ValueError, match="shapes must agree") as caught:
        flax_params(template, torch.nn.Linear(2, 3))
    assert "weight of shape (2, 3) for template['kernel'] (3, 2)" in str(caught.value)
    assert "bias of shape (3,) for template['bias'] (4,)" in str(caught.value)


def test_weights_widen_but_never_narrow():
    module = torch.nn.Linear(2, 3)
    template = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"weight of float64 for template\['kernel'\] float32"):
        flax_params(template, module.double())
    filled = flax_params(template, module.bfloat16())
    assert filled["kernel"].dtype == jnp.float32
    half = jax.tree.map(lambda x: x.astype(jnp.float16), template)
    with pytest.raises(ValueError, match="weight of bfloat16"):
        flax_params(half, module)
    shapes = jax.eval_shape(lambda: template)
    assert flax_params(shapes, module)["bias"].dtype == jnp.float32


def test_a_template_of_float64_without_x64_is_refused():
    template = {"kernel": jax.ShapeDtypeStruct((2, 3), np.float64)}
    with pytest.raises(ValueError, match="no value may be rounded"):
        flax_params(template, torch.nn.Linear(2, 3, bias=False).double())


def test_a_rename_of_nothing_is_refused():
    template = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"got \['fcc'\]. Take them from module.named_modules"):
        flax_params(template, torch.nn.Linear(2, 3), rename={"fcc": "Dense_0"})


def test_an_epsilon_that_differs_is_refused_where_it_shows():
    with pytest.raises(ValueError, match="got 1e-05 for '' in torch and 1e-06"):
        flax_params(nnx.LayerNorm(4, rngs=rngs()), torch.nn.LayerNorm(4))
    with pytest.raises(ValueError, match="epsilon"):
        flax_params(nnx.RMSNorm(4, rngs=rngs()), torch.nn.RMSNorm(4))
    near = nnx.RMSNorm(4, epsilon=float(np.finfo(np.float32).eps), rngs=rngs())
    flax_params(near, torch.nn.RMSNorm(4))


def tied():
    module = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)}
    )
    module["head"].weight = module["embed"].weight
    return module


def test_boxed_parameters_states_and_subclasses_are_filled():
    module = torch.nn.Linear(3, 2)
    kernel = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    boxed = nn.Dense(2, kernel_init=kernel).init(jax.random.key(0), jnp.ones(3))
    filled = flax_params(boxed, module)["params"]["kernel"]
    assert filled.names == (None, "model")
    np.testing.assert_array_equal(filled.value, module.weight.T.detach())
    state = nnx.state(nnx.Linear(3, 2, rngs=rngs()), nnx.Param)
    assert isinstance(flax_params(state, module), nnx.State)

    class LoRA(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.low = torch.nn.Parameter(torch.ones(3, 1))

    template = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2), "low": jnp.zeros((3, 1))}
    assert flax_params(template, LoRA())["low"].all()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadAttention(num_heads=2, name="self_attn", **F64)
        x = nn.LayerNorm(epsilon=1e-5, name="norm1", **F64)(x + attention(x))
        hidden = nn.relu(nn.Dense(6, name="linear1", **F64)(x))
        hidden = nn.Dense(4, name="linear2", **F64)(hidden)
        return nn.LayerNorm(epsilon=1e-5, name="norm2", **F64)(x + hidden)


def test_a_transformer_layer_of_torch_fills_a_flax_one(x64):
    module = torch.nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    check_linen(Block(), module, torch.randn(2, 3, 4))


def test_a_tied_weight_may_have_one_place_or_two():
    module = tied()
    once = {"embed": {"embedding": jnp.ones((5, 3))}}
    filled = flax_params(once, module)
    np.testing.assert_array_equal(filled["embed"]["embedding"], module["embed"].weight.detach())
    twice = {**once, "head": {"kernel": jnp.ones((3, 5))}}
    filled = flax_params(twice, module)
    np.testing.assert_array_equal(filled["head"]["kernel"], filled["embed"]["embedding"].T)


def test_the_gradient_of_a_tied_weight_is_only_given_to_a_tied_leaf():
    module = tied()
    once = {"embed": {"embedding": jnp.ones((5, 3))}}
    module["head"](module["embed"](torch.tensor([1]))).sum().backward()
    grads = flax_grads(once, module)
    np.testing.assert_array_equal(grads["embed"]["embedding"], module["embed"].weight.grad)
    with pytest.raises(ValueError, match="flax_grads: torch has added the gradients of tied"):
        flax_grads({**once, "head": {"kernel": jnp.ones((3, 5))}}, module)


def test_gradients_are_required_and_an_unused_parameter_gets_zeros():
    module = torch.nn.Linear(2, 3)
    template = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"flax_grads: .*Call loss.backward\(\) first"):
        flax_grads(template, module)
    module.bias.sum().backward()
    assert not flax_grads(template, module)["kernel"].any()


def test_complex_parameters_cross_and_their_gradients_are_conjugated():
    module = torch.nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    template = {"kernel": jnp.ones((2, 1), jnp.complex64)}
    params = flax_params(template, module)
    (module(torch.ones(2, dtype=torch.complex64)).abs() ** 2).sum().backward()
    ours = jax.grad(lambda p: (jnp.abs(jnp.ones(2) @ p["kernel"]) ** 2).sum())(params)
    np.testing.assert_allclose(flax_grads(template, module)["kernel"], ours["kernel"], rtol=1e-5)


def test_layers_that_flax_cannot_express_are_refused():
    leaf = jnp.ones((2, 2))
    with pytest.raises(ValueError, match=r"no groups; got groups=2"):
        flax_params({"kernel": leaf}, torch.nn.ConvTranspose1d(2, 2, 1, groups=2))
    with pytest.raises(ValueError, match=r"max_norm=1"):
        flax_params({"embedding": leaf}, torch.nn.Embedding(2, 2, max_norm=1.0))
    with pytest.raises(ValueError, match="add_zero_attn"):
        flax_params({"query": {}}, torch.nn.MultiheadAttention(2, 1, add_zero_attn=True))
    with pytest.raises(ValueError, match="weight_hr_l0"):
        flax_params({"cell": {}}, torch.nn.LSTM(3, 4, proj_size=2))
    with pytest.raises(ValueError, match="parametrizations.weight.original0"):
        normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
        flax_params({"kernel": leaf, "bias": jnp.ones(2)}, normed)
    bound = torch.nn.MultiheadAttention(2, 1, add_bias_kv=True)
    with pytest.raises(ValueError, match="bias_k"):
        flax_params({"query": {"kernel": jnp.ones((2, 1, 2))}}, bound)
