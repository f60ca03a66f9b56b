"""Rows of section 1: the graph, its leaves, what it saves, and accumulation."""

import jax
import jax.numpy as jnp
import optax

from funcgrad.parity._table import agree, error_of, row


@row(
    "engine.graph",
    concept="graph, grad_fn, next_functions",
    torch="loss.grad_fn.next_functions",
    here="graph = fg.graph(fun)(x); graph.readers(node)",
    needs=("graph",),
    note="Read from the program, not recorded: both passes, with bytes, FLOPs and source lines.",
)
def graph():
    """A net of four operations: what leads to what in the backward pass, and the shapes."""
    import torch

    import funcgrad as fg

    w, s = torch.randn(3, 4, requires_grad=True), torch.randn(5, 1, requires_grad=True)
    x = torch.randn(5, 3)
    loss = torch.tanh((x @ w) * s).sum()

    # next_functions, followed to the leaves; on each way the shape of the gradient.
    called = {"SumBackward0": "sum", "TanhBackward0": "tanh", "MulBackward0": "mul"}
    called |= {"MmBackward0": "matmul"}
    theirs, waiting = {}, [loss.grad_fn]
    while waiting:
        fn = waiting.pop()
        for after, _ in fn.next_functions:
            if after is not None:
                leaf = getattr(after, "variable", None)
                name = called.get(after.name()) or ("w" if leaf is w else "s")
                kept = [] if leaf is not None else _shape_of_gradient(after)
                theirs[called[fn.name()], name] = leaf.shape if leaf is not None else kept
                waiting.append(after)
    loss.backward()

    def fun(w, s, x):
        product = x @ w  # matmul
        scaled = product * s  # mul
        squashed = jnp.tanh(scaled)  # tanh
        return squashed.sum()  # sum

    arrays = [jnp.asarray(t.detach().numpy()) for t in (w, s, x)]
    found = fg.graph(fun, argnums=(0, 1))(*arrays)
    ours = {}
    # An operation of torch is one line here, of several primitives.
    place = lambda node: node.name or node.line.code.rpartition("# ")[2]
    for node in [node for node in found.backward if node.operation != "seed"]:
        for after in found.readers(node):
            if place(node) != place(after):
                ours[place(node), place(after)] = node.outputs[0].shape

    ways = sorted({*theirs, *ours})
    return agree(
        ways=([way in theirs for way in ways], [way in ours for way in ways], [True] * 5),
        shapes=(
            [size for way in ways for size in theirs[way]],
            [size for way in ways for size in ours[way]],
        ),
        said={"ways": [" to ".join(way) for way in ways]},
    )


def _shape_of_gradient(fn):
    """The list that will hold the shape of what reaches ``fn`` in the backward pass."""
    shape = []
    fn.register_prehook(lambda grads: shape.extend(grads[0].shape))
    return shape


@row(
    "engine.leaf",
    concept="leaf, requires_grad, is_leaf",
    torch="torch.tensor(w, requires_grad=True)",
    here="jax.grad(fun, argnums=0)",
    note="A leaf is an argument that one differentiates; an integer is refused by both.",
)
def leaf():
    """Only the chosen input gets a gradient, and it must be floating."""
    import torch

    w, x = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0])
    (w @ x).backward()
    theirs = error_of(
        lambda: torch.tensor([1, 2], requires_grad=True), RuntimeError, "floating point"
    )

    here = jax.grad(lambda w, x: w @ x, argnums=0)(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]))
    ours = error_of(lambda: jax.grad(jnp.sum)(jnp.array([1, 2])), TypeError, "real- or complex")

    said = {"torch": theirs, "here": ours}
    return agree(leaf=(w.grad, here, [3, 4]), other=(x.grad is None, True), said=said)


@row(
    "engine.integer_leaf",
    concept="an integer leaf among the parameters",
    torch="module.table.requires_grad_()",
    here="fg.per_sample_grads(loss)(params, x)  # TypeError",
    needs=("per_sample_grads",),
    note="jax.grad names the dtype, fg names the leaf.",
)
def integer_leaf():
    """Refused on both sides, here with the path of the leaf."""
    import torch

    import funcgrad as fg

    steps = torch.tensor([1, 2])
    theirs = error_of(lambda: steps.requires_grad_(), RuntimeError, "floating point")

    params = {"w": jnp.ones(2), "steps": jnp.array([1, 2])}
    grads = fg.per_sample_grads(lambda params, x: params["w"] @ x)
    ours = error_of(lambda: grads(params, jnp.ones((3, 2))), TypeError, "params['steps'] of int64")

    return agree(said={"torch": theirs, "here": ours})


@row(
    "engine.saved_tensors",
    concept="saved tensors",
    torch="saved_tensors_hooks(pack, unpack)",
    here="fg.saved_tensors(fun)(x)",
    needs=("saved_tensors",),
    note="Each with its bytes, producer, name and source line; tanh keeps one value more in JAX.",
)
def saved_tensors():
    """Bytes kept by two nets: equal, and where tanh stands by one array more."""
    import torch

    import funcgrad as fg

    def theirs(fun, *args):
        sizes = {}

        def pack(t):
            # One storage is kept once, however many operations keep it.
            sizes[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
            return t

        args = [arg.clone().requires_grad_() for arg in args]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            keep_alive = fun(*args)
        del keep_alive
        return sum(sizes.values())

    w, x = torch.randn(3, 4), torch.randn(5, 3)
    here = [jnp.asarray(t.numpy()) for t in (w, x)]

    # w, x, exp(x w) and the product that multiplies it.
    products = theirs(lambda w, x: (torch.exp(x @ w) * (x @ w)).sum(), w, x)
    ours = fg.saved_tensors(lambda w, x: (jnp.exp(x @ w) * (x @ w)).sum())(*here)

    # torch keeps t = tanh(a) and computes 1 - t² in the backward pass; JAX multiplies the
    # tangent by (1 - t) and then adds t times that: it keeps t and 1 - t.
    tanh = theirs(lambda w, x: torch.tanh(x @ w).sum(), w, x)
    more = fg.saved_tensors(lambda w, x: jnp.tanh(x @ w).sum())(*here)
    kept = jax.eval_shape(
        lambda *args: jax.vjp(lambda w, x: jnp.tanh(x @ w).sum(), *args)[1], *here
    )
    leaves = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))

    return agree(
        bytes=(products, ours.bytes, 8 * (12 + 15 + 20 + 20)),
        one_more=(tanh + 8 * 20, more.bytes, leaves),
        said={"table": str(ours)},
    )


@row(
    "engine.version_counter",
    concept="version counter, in-place corruption",
    torch="y = x.exp(); y.add_(1); y.sum().backward()",
    here="y[0] = 1  # impossible: TypeError",
    note="torch finds at run time that a saved tensor changed; a JAX array cannot change.",
)
def version_counter():
    """The torch program raises in backward, the JAX program cannot be written."""
    import torch

    y = torch.ones(2, requires_grad=True).exp()
    y.add_(1.0)
    theirs = error_of(lambda: y.sum().backward(), RuntimeError, "modified by an inplace operation")

    def corrupt(x):
        y = jnp.exp(x)
        y[0] = 1.0
        return y.sum()

    ours = error_of(lambda: jax.grad(corrupt)(jnp.ones(2)), TypeError, "item assignment")
    return agree(said={"torch": theirs, "here": ours})


@row(
    "engine.retain_graph",
    concept="retain_graph",
    torch="y.backward(seed, retain_graph=True)",
    here="y, pull = jax.vjp(fun, x); pull(seed)",
    note="The pullback is a function: call it as often as needed, nothing is freed under it.",
)
def retain_graph():
    """Two cotangents, one forward; without retain_graph torch refuses the second."""
    import torch

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x**3
    (first,) = torch.autograd.grad(y, x, torch.tensor([1.0, 0.0]), retain_graph=True)
    (second,) = torch.autograd.grad(y, x, torch.tensor([0.0, 1.0]))
    third = error_of(lambda: torch.autograd.grad(y, x, torch.ones(2)), RuntimeError, "second time")

    _, pull = jax.vjp(lambda x: x**3, jnp.array([1.0, 2.0]))
    (one,), (two,) = pull(jnp.array([1.0, 0.0])), pull(jnp.array([0.0, 1.0]))

    return agree(first=(first, one, [3, 0]), second=(second, two, [0, 12]), said={"torch": third})


@row(
    "engine.accumulation",
    concept="accumulation into .grad",
    torch="loss.backward(); loss.backward()",
    here="jax.tree.map(jnp.add, grads, more)",
    note="A gradient is a value; adding two of them is written down.",
)
def accumulation():
    """Two backward passes add up in ``.grad``, two gradients add up where one says so."""
    import torch

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    seen = []
    for _ in range(2):
        (x**2).sum().backward()
        seen.append(x.grad.clone())

    grads = jax.grad(lambda x: (x**2).sum())(jnp.array([1.0, 2.0]))

    return agree(once=(seen[0], grads, [2, 4]), twice=(seen[1], grads + grads, [4, 8]))


@row(
    "engine.accumulate_grads",
    concept="accumulation over micro-batches",
    torch="for b in micro: loss(b).backward()",
    here="fg.accumulate_grads(fun, microbatch_size)",
    needs=("accumulate_grads",),
    note="No hidden state: one function of the whole batch; None for frozen leaves.",
)
def accumulate():
    """Micro-batches of one sample; then SGD, which leaves what has no gradient at 0.89."""
    import torch

    import funcgrad as fg

    data = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    w, x = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(data)
    for sample in x:
        ((sample @ w) ** 2 / len(data)).backward()
    p = torch.nn.Parameter(torch.tensor(0.89))
    torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1).step()

    def loss(params, x):
        return jnp.sum((x @ params["w"] * params["p"] / 0.89) ** 2), x.shape[0]

    params = {"w": jnp.array([1.0, 2.0]), "p": jnp.array(0.89)}
    grads = fg.accumulate_grads(loss, 1, frozen="p")(params, jnp.array(data)).grads
    opt = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    used = {name: grad for name, grad in grads.items() if grad is not None}
    kept = {name: params[name] for name in used}
    updates, _ = opt.update(used, opt.init(kept), kept)
    params = params | optax.apply_updates(kept, updates)

    return agree(grad=(w.grad, grads["w"], [48, 64]), skipped=(p, params["p"], 0.89))


@row(
    "engine.zero_grad",
    concept="zero_grad(set_to_none)",
    torch="opt.zero_grad(set_to_none=True)",
    here="params | update(used)",
    note="A zero gradient still decays and moves by momentum: 0.7821; no gradient: 0.89.",
)
def zero_grad():
    """SGD, momentum 0.9, weight decay 0.1: None skips the parameter, zeros step it."""
    import torch

    def theirs(set_to_none):
        p = torch.nn.Parameter(torch.tensor(1.0))
        opt = torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1)
        p.backward()
        opt.step()
        opt.zero_grad(set_to_none=set_to_none)
        opt.step()
        return p

    opt = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    p = jnp.array(1.0)
    update, state = opt.update(jax.grad(lambda p: p)(p), opt.init(p), p)
    skipped = optax.apply_updates(p, update)
    update, _ = opt.update(jnp.zeros_like(p), state, skipped)
    stepped = optax.apply_updates(skipped, update)

    return agree(none=(theirs(True), skipped, 0.89), zeros=(theirs(False), stepped, 0.7821))
