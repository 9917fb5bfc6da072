"""Gated DeltaNet layers of transformers on public Triton kernels (flash-linear-attention), and the proof that these run.

transformers takes from that package the delta rule alone, with query and key heads repeated for every value head, and
leaves convolution, gates and norm to torch. Here a layer keeps its parameters and its formulas, and all of it but the
projections is one of those kernels, as in that package's own layer.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import typing

import torch
import torch.nn.functional as F

OLDEST_TRITON = (3, 7, 1)  # Before it, back to 3.4, gradients of the gates are wrong on Hopper (its issue 640).
# What a forward and a backward must have launched.
LAUNCHED = ("causal_conv1d_fwd", "causal_conv1d_bwd", "chunk_gated_delta_rule_fwd_kernel_h", "chunk_fwd_kernel_o",
            "chunk_gated_delta_rule_bwd_kernel_dhu", "chunk_bwd_kernel_dqkwg", "layer_norm_gated_fwd", "layer_norm_gated_bwd")
CHECKED_TOKENS = 100  # A chunk of the delta rule and a part of one: few, for the formulas keep a state for each token.
# Of the norm of each output and gradient. Operands in bfloat16 alone make up to 0.014; the package's own tests allow its
# gradients 0.02 of rounding inside; kernels that are wrong are off by much of the norm.
CHECKED_DIFFERENCE = 0.1


class Kernels(typing.NamedTuple):
    convolve: typing.Callable    # (x [B, T, C], weight [C, taps], activation="silu") -> (y, None): causal, depthwise
    delta_rule: typing.Callable  # (q, k [B, T, n_k, d_k], v [B, T, n_v, d_v], a, b [B, T, n_v], ...) -> (o, None)
    norm: typing.Callable        # (x, gate, weight, None, "silu", eps=1e-6) -> RMSNorm(x) weight silu(gate)


class Missing(Exception):
    """The public kernels are not installed, or not as they are needed."""


def public_kernels():
    """(Kernels, "fla 0.6.0, triton 3.7.1"). Raises Missing."""
    try:
        import triton
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise Missing(f"Gated DeltaNet needs flash-linear-attention: {error}; bench/offload_vs_fsdp2/README.md says how to "
                      "bring it, --delta-kernels torch goes without and is many times slower") from error
    if tuple(map(int, triton.__version__.split("+")[0].split(".")[:3])) < OLDEST_TRITON:
        raise Missing(f"Gated DeltaNet's gradients need triton from {'.'.join(map(str, OLDEST_TRITON))}, "
                      f"this is {triton.__version__}")
    rule = functools.partial(chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                             use_beta_sigmoid_in_kernel=True, state_v_first=True)
    words = f"fla {importlib.metadata.version('fla-core')}, triton {triton.__version__}"
    return Kernels(causal_conv1d, rule, rms_norm_gated), words


def _mix(layer, kernels, hidden_states, **_):
    """The forward of a transformers Gated DeltaNet module for whole sequences: no cache, no padding."""
    batch, length, _ = hidden_states.shape
    mixed, _ = kernels.convolve(layer.in_proj_qkv(hidden_states), layer.conv1d.weight.squeeze(1), activation="silu")
    query, key, value = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    core, _ = kernels.delta_rule(
        query.reshape(batch, length, -1, layer.head_k_dim), key.reshape(batch, length, -1, layer.head_k_dim),
        value.reshape(batch, length, -1, layer.head_v_dim), layer.in_proj_a(hidden_states), layer.in_proj_b(hidden_states),
        A_log=layer.A_log.float(), dt_bias=layer.dt_bias.float())
    gate = layer.in_proj_z(hidden_states).view(batch, length, -1, layer.head_v_dim)
    core = kernels.norm(core, gate, layer.norm.weight, None, "silu", eps=layer.norm.variance_epsilon)
    return layer.out_proj(core.reshape(batch, length, -1))


def use(layer, kernels):
    """From now on the module goes through `kernels`."""
    if layer.activation != "silu":
        raise ValueError(f"Gated DeltaNet with {layer.activation} is not covered here")
    layer.forward = functools.partial(_mix, layer, kernels)


# The same in plain torch, token by token: what the kernels are held against.

def _convolve(x, weight, activation):
    taps = weight.shape[1]
    rows = F.pad(x, (0, 0, taps - 1, 0)).unfold(1, taps, 1)  # [B, T, C, taps]
    return F.silu((rows * weight).sum(-1)), None


def _delta_rule(query, key, value, a, b, A_log, dt_bias):
    """S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q / sqrt(d_k). Yang et al., 2024 (arXiv 2412.06464)."""
    repeats = value.shape[2] // query.shape[2]
    unit = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    query, key = (unit(x.float()).repeat_interleave(repeats, 2) for x in (query, key))
    decay, beta = torch.exp(-A_log.exp() * F.softplus(a.float() + dt_bias)), b.float().sigmoid()
    state = value.new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3], dtype=torch.float32)
    rows = []
    for t in range(value.shape[1]):
        state = state * decay[:, t, :, None, None]
        change = beta[:, t, :, None] * (value[:, t].float() - torch.einsum("bhkv,bhk->bhv", state, key[:, t]))
        state = state + key[:, t, :, :, None] * change[:, :, None]
        rows.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(rows, 1).to(value.dtype) * query.shape[3]**-0.5, None


def _norm(x, gate, weight, _, activation, eps):
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return (scaled * F.silu(gate.float())).to(x.dtype)


REFERENCE = Kernels(_convolve, _delta_rule, _norm)


def difference(layer, kernels, others, hidden, slope):
    """{name: |one - other| / |other|} of the output and of every gradient, `layer` with `kernels` and with `others` =
    (layer, kernels). `slope`: the gradient of the output."""
    found = []
    for module, functions in ((layer, kernels), others):
        type_of_weights = module.out_proj.weight.dtype
        given = hidden.to(type_of_weights).detach().requires_grad_()
        output = _mix(module, functions, given)
        names, parameters = zip(*module.named_parameters(), strict=True)
        gradients = torch.autograd.grad(output, (given, *parameters), slope.to(type_of_weights))
        found.append(dict(zip(("output", "input", *names), (output, *gradients), strict=True)))
    wide = lambda x: x.detach().double()  # noqa: E731
    return {name: (torch.linalg.norm(wide(one) - wide(found[1][name])) / torch.linalg.norm(wide(found[1][name]))).item()
            for name, one in found[0].items()}


@contextlib.contextmanager
def launched_kernels():
    """A set that gets the name of every Triton kernel launched meanwhile."""
    import triton

    names = set()
    hook = lambda metadata: names.add(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield names
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)


def check(module_type, config, layer_index, kernels, device):
    """Raises Missing unless a layer of this shape runs on the device by `kernels`, forward and backward, and gives what
    REFERENCE does."""
    with torch.device(device):
        rounded, wide = (module_type(config, layer_index).to(dtype) for dtype in (torch.bfloat16, torch.float32))
        hidden, slope = torch.randn(2, 2, CHECKED_TOKENS, config.hidden_size).bfloat16()
    wide.load_state_dict(rounded.state_dict())
    with launched_kernels() as names:
        found = difference(rounded, kernels, (wide, REFERENCE), hidden, slope)
    missing = [wanted for wanted in LAUNCHED if not any(name.startswith(wanted) for name in names)]
    if missing:
        raise Missing(f"Gated DeltaNet ran without the Triton kernels {', '.join(missing)}")
    wrong = {name: round(value, 4) for name, value in found.items() if not value < CHECKED_DIFFERENCE}
    if wrong:
        raise Missing(f"Gated DeltaNet's kernels differ from its formulas: {wrong}")


class Chosen(typing.NamedTuple):
    words: str              # "fla 0.6.0, triton 3.7.1" or "torch"
    check: typing.Callable  # As check() above, of a first module's shape. After a step: what is launched first tunes the
                            # kernels for all later shapes, and the checked ones are few tokens.


def choose(layers, config, choice, device):
    """Gives the Gated DeltaNet modules of transformers' layers their kernels: "fla" or "torch", None: fla on a GPU. Returns
    what was Chosen, None if no layer has such a module. Raises Missing."""
    mixers = [(index, layer.linear_attn) for index, layer in enumerate(layers) if hasattr(layer, "linear_attn")]
    if not mixers:
        return None
    if (choice or ("fla" if device.type == "cuda" else "torch")) == "torch":
        if importlib.util.find_spec("fla"):
            raise Missing("transformers takes flash-linear-attention where it is installed, so this would not be torch")
        return Chosen("torch", lambda: None)
    kernels, words = public_kernels()
    for _, mixer in mixers:
        use(mixer, kernels)
    index, first = mixers[0]
    return Chosen(words, functools.partial(check, type(first), config, index, kernels, device))
