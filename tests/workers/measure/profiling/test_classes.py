"""Classes of kernels, by names that were recorded on an H200, and by shortened ones of other devices."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kernels.attention
from workers.measure.profiling import classes
from workers.measure.profiling.attribution import RecordedWork
from workers.measure.profiling.classes import CLASSES, class_of_kernel, class_of_operator, classify

NATIVE = "void at::native::"
KERNELS = {
    "matmul": [
        "ampere_sgemm_128x64_tn",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_ffma_cublas",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN",
        "nvjet_sss_128x128_32x6_2x1_v_bz_NTN",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(Params)",
        "void gemmSN_NN_kernel<float, 256, 4, 2, 8, 4, 4, false, cublasGemvTensorStridedBatched<float const> >(int)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>(int)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(float)",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const> > >(float)",
        "triton_tem_fused_mm_4",
        "triton_mm",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4> >(Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64> >(P)",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64> >(Flash_bwd_params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, Sm80>::Params)",
        "fmha_cutlassB_bf16_aligned_128x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x128x64_kernel0_0",
        "triton_tem_fused_flex_attention_0",
        "triton_tem_fused_flex_attention_backward_3",
        "_attn_fwd",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, float const*)",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 9, false, false>(float*)",
        NATIVE + "(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, SoftMaxForwardEpilogue>(float*)",
        NATIVE + "(anonymous namespace)::cunn_SoftMaxBackwardSmem<4, float, float, float>(float*)",
        "triton_per_fused__softmax_div_masked_fill_3",
        "triton_red_fused_logsumexp_7",
    ],
    "normalisation": [
        NATIVE + "(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*)",
        NATIVE + "(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<float, float>(float const*)",
        NATIVE + "(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long, long)",
        NATIVE + "(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float, float const*)",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
        "triton_per_fused_native_layer_norm_1",
    ],
    "elementwise": [
        NATIVE + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)",
        NATIVE + "vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(at::TensorIteratorBase&)>(int)",
        NATIVE + "elementwise_kernel<128, 2, gpu_kernel_impl_nocast<BinaryFunctor<MulFunctor<float> > > >(int)",
        NATIVE + "elementwise_kernel<128, 4, gpu_kernel_impl<masked_fill_kernel(at::TensorIterator&)> >(int)",
        "void triu_tril_kernel<bool, int, true, 2, false>(at::cuda::detail::TensorInfo<bool, int>)",
        NATIVE + "(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(long)",
        "triton_poi_fused_mul_silu_5",
        # Named after adjacent operators.
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_1",
        "triton_poi_fused__to_copy__unsafe_view_add_flash_attention_mul_slice_stack_sub_transpose_view_2",
        "triton_poi_fused__unsafe_view_add_7",
        "triton_poi_fused_clone_tanh_3",
    ],
    "copy": [
        # Of compiled blocks in bfloat16: the copies of weights, and of transposed heads.
        "triton_poi_fused__to_copy_1",
        "triton_poi_fused_clone_transpose_3",
        "triton_poi_fused__to_copy_mm_2",
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        NATIVE + "unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
        NATIVE
        + "elementwise_kernel<128, 2, gpu_kernel_impl_nocast<direct_copy_kernel_cuda(TensorIteratorBase&)> >(int)",
        NATIVE
        + "vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
        NATIVE + "vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)",
        NATIVE
        + "(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::OpaqueType<4u>, unsigned int>(char*)",
        NATIVE + "(anonymous namespace)::vectorized_gather_kernel<16, long>(char*, char*, long*)",
        NATIVE + "(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(float)",
        NATIVE
        + "_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel<false> >(int)",
    ],
    "reduction": [
        NATIVE + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >(float)",
        NATIVE + "reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float> > >(float)",
        NATIVE + "(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)",
        NATIVE + "(anonymous namespace)::compute_grad_weight<float, long>(long const*, float const*)",
        NATIVE + "(anonymous namespace)::sum_and_scatter<float, long>(long const*)",
        "triton_red_fused_sum_3",
        "triton_per_fused_linalg_vector_norm_0",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    ],
    "optimizer": [
        NATIVE + "(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >(int)",
        NATIVE + "(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, UnaryOpFunctor<float> >(int)",
    ],
    "other": ["my_kernel", "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(bool*)", ""],
}
OPERATORS = {
    "matmul": ["aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::matmul", "aten::linear", "aten::mv"],
    "attention": [
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_cudnn_attention",
        "flopwatch::cpu_flash_backward",
        "flopwatch::flash_attention",
        "TritonFlashAttention2",
        "TritonFlashAttention2Backward",
    ],
    "softmax": ["aten::softmax", "aten::_softmax", "aten::_log_softmax", "aten::_softmax_backward_data"],
    "normalisation": ["aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::rms_norm"],
    "elementwise": ["aten::add_", "aten::mul", "aten::silu_backward", "aten::masked_fill", "aten::_foreach_sqrt_"],
    "copy": ["aten::copy_", "aten::_to_copy", "aten::cat", "aten::fill_", "aten::gather", "aten::embedding"],
    "reduction": ["aten::sum", "aten::mean", "aten::linalg_vector_norm", "aten::embedding_dense_backward"],
    "communication": ["c10d::allreduce_", "gloo:all_reduce", "nccl:all_reduce", "record_param_comms nccl"],
    "optimizer": ["aten::_fused_adamw_"],
    "other": [
        *("aten::view", "aten::as_strided", "aten::t", "aten::empty", "aten::to", "aten::addcmul_mm"),
        *("autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "TorchDynamo Cache Lookup"),
    ],
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_rms_norm_kernel", "normalisation"),
        ("_rms_norm_backward_kernel", "normalisation"),
        ("_softmax_gradient_kernel", "softmax"),
        ("_swiglu_backward_kernel", "elementwise"),
        ("_rope_kernel", "elementwise"),
    ],
)
def test_our_kernels_beside_attention(name: str, expected: str) -> None:
    assert class_of_kernel(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("triton_poi_fused__to_copy_1", "copy"),
        ("triton_poi_fused__to_copy__unsafe_view_add_flash_attention_mul_view_2", "elementwise"),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0", "normalisation"),
        ("triton_tem_fused_mm_4", "matmul"),
    ],
)
def test_a_compiled_operator_has_its_kernels_class(name: str, expected: str) -> None:
    assert class_of_operator(name) == class_of_kernel(name) == expected


def test_every_class_has_examples() -> None:
    assert set(KERNELS) == set(OPERATORS) == set(CLASSES)


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
