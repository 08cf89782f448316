"""Classes of kernels, by names that were recorded on an H200, and by shortened ones of other devices."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kernels.attention
from workers.measure.profiling import classes
from workers.measure.profiling.attribution import RecordedWork
from workers.measure.profiling.classes import class_of_kernel, class_of_operator, classify

NATIVE = "void at::native::"
KERNELS = {
    "matmul": [
        "ampere_sgemm_128x64_tn",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>(int)",
        "triton_tem_fused_mm_4",
        "triton_mm",
    ],
    "attention": ["triton_tem_fused_flex_attention_0", "triton_tem_fused_flex_attention_backward_3", "_attn_fwd"],
    "softmax": ["triton_per_fused__softmax_div_masked_fill_3", "_softmax_gradient_kernel"],
    "normalisation": [
        NATIVE + "(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*)",
        NATIVE + "(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float, float const*)",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
        "_rms_norm_backward_kernel",
    ],
    "elementwise": [
        NATIVE + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)",
        "_rope_kernel",
    ],
    "copy": [
        NATIVE
        + "(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::OpaqueType<4u>, unsigned int>(char*)",
        NATIVE + "(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(float)",
    ],
    "reduction": [
        NATIVE + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >(float)",
        "triton_red_fused_sum_3",
        "triton_per_fused_linalg_vector_norm_0",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    ],
    "optimizer": [NATIVE + "(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >(int)"],
    "other": ["my_kernel", "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(bool*)", ""],
}
OPERATORS = {
    "matmul": [
        *("aten::baddbmm", "aten::linear", "aten::addmm_", "aten::convolution_backward", "aten::mkldnn_convolution"),
        *("aten::_conv_depthwise2d", "aten::slow_conv_transpose2d", "aten::mkldnn_rnn_layer_backward"),
    ],
    "attention": [
        "aten::_scaled_dot_product_cudnn_attention",
        "flopwatch::cpu_flash_backward",
        "TritonFlashAttention2",
    ],
    "softmax": ["aten::_log_softmax", "aten::_softmax_backward_data"],
    "normalisation": ["aten::native_layer_norm_backward"],
    "elementwise": ["aten::add_", "aten::silu_backward", "aten::masked_fill", "aten::_foreach_sqrt_", "aten::elu_"],
    "copy": ["aten::_to_copy", "aten::fill_", "aten::embedding"],
    "reduction": [
        "aten::linalg_vector_norm",
        "aten::embedding_dense_backward",
        "aten::max_pool2d_with_indices_backward",
    ],
    "communication": ["c10d::allreduce_", "gloo:all_reduce", "record_param_comms nccl"],
    "optimizer": ["aten::_fused_adamw_"],
    "other": ["aten::view", "aten::to", "aten::addcmul_mm", "autograd::engine::evaluate_function: MmBackward0"],
}


@pytest.mark.parametrize(("name", "expected"), [(name, known) for known, names in KERNELS.items() for name in names])
def test_kernels(name: str, expected: str) -> None:
    assert class_of_kernel(name) == expected


def test_kernels_that_an_h200_ran() -> None:
    """The whole names, of torch 2.11: eager and compiled steps in fp32 and bf16, with each attention, and in a graph.

    The sorting for the embedding's gradient is under `other`: only its operator determines its class.
    """
    recorded = json.loads((Path(__file__).parent / "h200_kernels.json").read_text())
    assert sum(map(len, recorded.values())) > 150
    assert {name: class_of_kernel(name) for names in recorded.values() for name in names} == {
        name: known for known, names in recorded.items() for name in names
    }


@pytest.mark.parametrize(("name", "expected"), [(name, known) for known, names in OPERATORS.items() for name in names])
def test_operators(name: str, expected: str) -> None:
    assert class_of_operator(name) == expected


def test_a_compiled_operator_has_its_kernels_class() -> None:
    assert class_of_operator("triton_tem_fused_mm_4") == "matmul"


def test_our_own_attention_kernels_are_attention() -> None:
    folder = Path(kernels.attention.__path__[0])
    names = [
        name
        for file in [*folder.glob("triton/*.py"), *folder.glob("hopper/*.py")]
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), flags=re.MULTILINE)
    ]
    assert {"forward_kernel", "keys_kernel", "queries_kernel", "rows_kernel", "wide_keys_kernel"} <= set(names)
    assert {class_of_kernel(name) for name in names} == {"attention"}
    assert class_of_kernel("_forward_kernel") == "other", "that of the weighted sum"


def work(name: str, kind: Any = "kernel", phase: str = "forward", **fields: Any) -> RecordedWork:
    return RecordedWork(name, kind, 0, 1, 1, 1, phase, **fields)


ADD = KERNELS["elementwise"][0]


def test_the_optimizers_launches_are_its_own() -> None:
    for name in ("ampere_sgemm_128x64_tn", ADD, "my_kernel", "Memset (Device)"):
        assert classify(work(name, phase="optimizer")) == "optimizer"
    assert classify(work("aten::mul_", "operator", "optimizer")) == "optimizer"
    assert classify(work(KERNELS["communication"][0], phase="optimizer")) == "communication"


def test_norms_that_are_written_out_are_known_by_their_range() -> None:
    norm = {"ranges": ("layers.0", "norm")}
    for name in (ADD, KERNELS["reduction"][0], "Memcpy DtoD (Device -> Device)"):
        assert classify(work(name, **norm)) == "normalisation"
    assert classify(work("ampere_sgemm_128x64_tn", **norm)) == "matmul"
    assert classify(work(ADD, ranges=("layers.0", "scores"))) == "elementwise"


def test_a_name_that_says_nothing_leaves_it_to_the_operator() -> None:
    assert classify(work("my_kernel", operator="aten::bmm")) == "matmul"
    assert classify(work("my_kernel", operator="MyFunction")) == "other"
    assert classify(work(ADD, operator="aten::bmm")) == "elementwise", "its own name counts more"
    assert classify(work("aten::view", "operator", operator="aten::view")) == classes.OTHER
