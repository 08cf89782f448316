"""Sorts kernels, and on a CPU operators, into classes by an explicit rule.

The rule; the first match decides:

1. Names of collective operations: communication, in every phase.
2. Everything else that the phase `optimizer` launches: optimizer.
3. The kernel's own name, by the patterns below, most specific first. A kernel that Inductor fused (`triton_poi_…`,
   `_red_`, `_per_`) is softmax or normalisation if its name says so, a copy if all operators in its name only move
   data, or else elementwise or a reduction; Inductor's products and attention are templates (`triton_tem_…`).
4. A reduction, elementwise kernel or copy inside a range `norm`: normalisation. Norms written out in PyTorch have no
   kernels of their own.
5. If its name matches no pattern: the class of the operator that launched it; or other.

The classes: products of matrices, also those of convolutions and recurrent layers; attention in one kernel (written-out
attention shows as matrix products, softmax and elementwise); softmax; normalisation; elementwise; copy (also fills,
gathers and concatenations, which move data and compute nothing); reduction; communication; optimizer; other.
"""

import functools
import re
from collections.abc import Sequence

from workers.measure.profiling.attribution import RecordedWork
from workers.measure.ranges import NORM

MATMUL = "matmul"
ATTENTION = "attention"
SOFTMAX = "softmax"
NORMALISATION = "normalisation"
ELEMENTWISE = "elementwise"
COPY = "copy"
REDUCTION = "reduction"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
OTHER = "other"
CLASSES = (*(MATMUL, ATTENTION, SOFTMAX, NORMALISATION, ELEMENTWISE, COPY, REDUCTION, COMMUNICATION, OPTIMIZER, OTHER),)
"""All classes, in the order of tables. `matmul` is the matrix product."""

Patterns = Sequence[tuple[str, re.Pattern[str]]]


def _patterns(*pairs: tuple[str, str], flags: re.RegexFlag = re.NOFLAG) -> Patterns:
    return [(name, re.compile(pattern, flags)) for name, pattern in pairs]


_COLLECTIVE = re.compile(r"nccl|^c10d::|^gloo:|AllReduce|AllGather|ReduceScatter|SendRecv", re.IGNORECASE)
_FUSED = re.compile(r"^triton_(poi|red|per|for)_")
"""Kernels that Inductor fused. Their names list the operators in them and also adjacent ones: a cast before a product
has `mm` in its name."""
_DATA_MOVING = (
    *("_to_copy", "clone", "copy_?", "cat", "stack", "embedding", "gather", "index", "index_select", "constant_pad_nd"),
    *("t", "transpose", "permute", "expand", "_?unsafe_view", "view", "_reshape_copy", "squeeze", "unsqueeze"),
    *("slice", "select", "split", "slice_scatter", "slice_backward", "select_backward", "full", "zeros", "new_zeros"),
    *("ones", "arange", "mm", "bmm"),
)
"""Operators that only move data, as pointwise kernels of Inductor name them. `mm` in such a name is adjacent only."""
_FUSED_KERNELS = _patterns(
    (SOFTMAX, r"softmax|logsumexp"),
    (NORMALISATION, r"(layer|rms|batch|group|instance)_norm|rsqrt|var_mean"),
    (REDUCTION, r"^triton_(red|per)_"),
    (COPY, rf"^triton_poi_fused(_({'|'.join(_DATA_MOVING)}))+(_\d+)?$"),
    (ELEMENTWISE, r""),
)
_KERNELS = _patterns(
    # Our own Triton kernels have short names, so they are matched whole.
    (ATTENTION, r"^(forward|backward|finish|rows|(wide_)?(keys|queries)|split|slices|combine|bounds)_kernel$"),
    (ATTENTION, r"flash|fmha|attention|attn|sdpa|_dot_do_o|convert_dq_"),
    (OPTIMIZER, r"fused_?adam|multi_tensor_apply"),
    (MATMUL, r"gemm|gemv|nvjet|xmma|cutlass|cublas|matmul|split_?k|dot_kernel|^triton_tem_|^triton_mm"),
    (SOFTMAX, r"softmax"),
    (NORMALISATION, r"(layer|rms|batch|group|instance)_?norm|rowwisemoments|gammabeta|welford"),
    (REDUCTION, r"scatter_gather_.*Reduce(Add|Mean|Minimum|Maximum|Multiply)"),
    (
        COPY,
        r"^memcpy|^memset|direct_copy|copy_kernel|copy_device_to_device|catarray|fillfunctor|(?<!masked_)fill_kernel",
    ),
    (COPY, r"gather_kernel|gather_elementwise|indexselect|index_select|index_elementwise|embedding_kernel|arange"),
    (REDUCTION, r"reduce|reduction|cub::.*(scan|sum)|_scan_|_norm_kernel|sum_kernel"),
    (REDUCTION, r"embedding_backward|embedding_grad|embedding_dense_backward|sum_and_scatter|grad_weight"),
    (ELEMENTWISE, r"elementwise|pointwise|triu_tril|masked_fill|scatter|distribution|where_kernel|_rope"),
    flags=re.IGNORECASE,
)
_ELEMENTWISE_OPERATORS = (
    *("add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "abs"),
    *("sign", "sigmoid", "silu", "relu", "gelu", "tanh", "erf", "clamp", "clamp_min", "clamp_max", "masked_fill"),
    *("where", "addcmul", "addcdiv", "lerp", "triu", "tril", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum"),
    *(r"bitwise_\w+", r"logical_\w+", "reciprocal", "floor", "ceil", "round", "remainder", "isinf", "isnan"),
    *("isfinite", "normal", "uniform", "random", "randint", "bernoulli", "dropout", "native_dropout"),
    *(r"(leaky_re|e|g)lu", "softplus", "log_sigmoid_forward", "mish", r"hard(tanh|sigmoid|swish)", "mse_loss"),
    r"(threshold|silu|sigmoid|tanh|native_dropout|\w*lu|softplus|mish|hard\w+|mse_loss)_backward",
)
_OPERATORS = _patterns(
    (ATTENTION, r"(?i)attention|flash|^flopwatch::cpu_"),
    (MATMUL, r"^aten::(add|b|badd)?(mm|bmm|mv)_?$|^aten::(dot|vdot|matmul|linear|einsum|outer|_addmm_activation)$"),
    (MATMUL, r"^aten::\w*conv(olution|_transpose|_depthwise|\d)\w*$|^aten::mkldnn_rnn_layer"),
    (MATMUL, r"^(mkl|mkldnn|onednn)\w*::.*(linear|matmul)|^aten::(_scaled_mm|_int_mm)$"),
    (SOFTMAX, r"^aten::_?(log_)?softmax(_backward_data)?$|^aten::logsumexp$"),
    (NORMALISATION, r"^aten::(native_|_fused_)?(layer|rms|batch|group|instance)_norm(_backward)?$"),
    (OPTIMIZER, r"^aten::_fused_(adam|adamw|sgd|adagrad)_?$"),
    (COPY, r"^aten::(copy_|_to_copy|clone|contiguous|cat|stack|fill_|zero_|zeros|ones|full|zeros_like|ones_like)$"),
    (COPY, r"^aten::(gather|index|index_select|embedding|slice_scatter|_index_put_impl_|index_put_|flip|roll)$"),
    (COPY, r"^aten::(arange|scalar_tensor|_local_scalar_dense|slice_backward|select_backward|new_zeros)$"),
    (REDUCTION, r"^aten::(sum|mean|amax|amin|max|min|any|all|prod|std|var|norm|argmax|argmin|cumsum|topk|sort)$"),
    (REDUCTION, r"^aten::(linalg_vector_norm|_foreach_norm|nll_loss\w*|embedding_dense_backward)$"),
    (REDUCTION, r"^aten::(scatter_add_|index_add_?|\w*(max|avg)_pool\w*)$"),
    (ELEMENTWISE, rf"^aten::(_foreach_)?({'|'.join(_ELEMENTWISE_OPERATORS)})_?$"),
)
_MAY_BE_A_NORM = frozenset({ELEMENTWISE, REDUCTION, COPY, OTHER})


def classify(work: RecordedWork) -> str:
    """Return the class of a piece of work, by the rule in this module's docstring."""
    class_name = class_of_operator(work.name) if work.kind == "operator" else class_of_kernel(work.name)
    if class_name == COMMUNICATION:
        return class_name
    if work.phase == OPTIMIZER:
        return OPTIMIZER
    if NORM in work.ranges and class_name in _MAY_BE_A_NORM:
        return NORMALISATION
    if class_name == OTHER and work.operator is not None and work.kind != "operator":
        return class_of_operator(work.operator)
    return class_name


@functools.cache
def class_of_kernel(name: str) -> str:
    """Return the class that follows from the name of a kernel, copy or fill; `other` if none does."""
    if _COLLECTIVE.search(name):
        return COMMUNICATION
    return _first(_FUSED_KERNELS if _FUSED.match(name) else _KERNELS, name)


@functools.cache
def class_of_operator(name: str) -> str:
    """Return the class that follows from the name of an operator; `other` if none does.

    Operators that only make a view, or call others, are `other`: their own time is the framework's.
    """
    if _COLLECTIVE.search(name):
        return COMMUNICATION
    # A compiler's fused code appears as an operator, too, under its kernel's name.
    return class_of_kernel(name) if name.startswith("triton_") else _first(_OPERATORS, name)


def _first(patterns: Patterns, name: str) -> str:
    return next((class_name for class_name, pattern in patterns if pattern.search(name)), OTHER)
