"""torch_npu's operators of inference give what loops in float64 give, and refuse by name what is not simulated."""

from __future__ import annotations

import re

from npu_sim.conftest import Sim


def _results(sim: Sim, program: str, refused: dict[str, str]) -> None:
    """Run a program; each of its lines must say True, except those of `refused`, which must match these patterns."""
    lines = dict(line.split(" ", 1) for line in sim.program(program).splitlines())
    said = {name: lines.pop(name, "") for name in refused}
    assert {name: line for name, line in lines.items() if line.strip() != "True"} == {}
    assert len(lines) > 20
    wrong = {name: line for name, line in said.items() if not re.search(refused[name], line)}
    assert wrong == {}


def test_attention_of_inference(sim: Sim) -> None:
    refused = {
        "page_beyond": "block_table names page 1..*the cache has 8",
        "pages_without_lengths": "block_table needs actual_seq_lengths_kv",
        "wrong_block_size": "block_size is 32, a page of key .* holds 16",
        "too_few_pages": "actual_seq_lengths_kv has 33, the tensor holds 32",
        "not_cumulative": "must be cumulative",
        "half_rope": "query_rope and key_rope must be given together",
        "out_shape": "attention_out must be c10::Half",
        "post_quantised": "npu_fused_infer_attention_score with quant_scale2 is not simulated",
        "dequantised": "npu_fused_infer_attention_score_v2 with dequant_scale_key is not simulated",
        "int8": "query must be float16 or bfloat16, got signed char",
        "layout": "layout only support .* but got SBH",
        "dims": "query's dim should be consistent with that of Layout",
        "mode_5": "with sparse_mode 5 is not simulated",
        "mode_3_alone": "sparse_mode 3 needs atten_mask",
        "other_mask": "an atten_mask other than the upper triangle is not simulated",
        "small_mask": "needs the compressed mask of shape \\[2048, 2048\\]",
        "prefix_alone": "key_shared_prefix and value_shared_prefix must be given together",
        "heads": "num_heads is 8, query has 4",
        "many_queries": "query must hold one token per sequence, got 5",
    }
    _results(sim, "infer_attention.py", refused)


def test_operators_of_atb(sim: Sim) -> None:
    refused = {
        "paged_int8": "atb::_npu_paged_attention with signed char is not simulated",
        "paged_page": "block_table names page",
        "qlens_mask": "with a mask other than the upper triangle is not simulated",
        "prefix_alibi": "_npu_flash_attention_prefix_v2 with mask_type 4 is not simulated",
        "flash_kernel": "kernel_type only supports",
        "mla_int8": "npu_multi_head_latent_attention with cache_mode int8_nzcache is not simulated",
        "stored_beyond": "slot 64 lies beyond the 64 of the cache",
        "stored_dtype": "the cache holds c10::Half, got float",
        "rotary_again": "with a second cos_sin_cache is not simulated",
        "rotary_part": "it rotates whole heads",
        "group_topk_groups": "does not divide into 5 groups",
        "matmul_add_half": "C must be float32",
        "missing": "operator atb::_npu_quantize_per_tensor is not simulated",
    }
    _results(sim, "infer_atb.py", refused)


def test_caches_rotations_and_filters(sim: Sim) -> None:
    refused = {
        "slot_beyond": "slot 64 lies beyond the 64 of the cache",
        "slot_count": "slot_mapping has 3 numbers for 5 tokens",
        "compressed": "npu_scatter_pa_cache with compress_lens is not simulated",
        "cache_mode": "cache_mode must be None, Norm or PA_NZ, got NZ",
        "scatter_nd_shape": "updates must be c10::Half \\[3, 6\\]",
        "scatter_nd_beyond": "out of bounds",
        "scatter_nd_negative": "indices must not be negative",
        "scatter_update_axis": "axis 0 must not be the first one",
        "scatter_update_2d": "scatter_update with indices of 2 dimensions is not simulated",
        "scatter_update_end": "index 8 \\+ 2 lies beyond 9",
        "normed_offset": "npu_kv_rmsnorm_rope_cache with k_rope_offset is not simulated",
        "normed_mode": "cache_mode ND is unknown",
        "interleave_size": "x must be \\[B, N, S, 64\\]",
        "mrope_mode": "rotary_mode only support half or interleave",
        "mrope_sections": "mrope_section must add up to 32",
        "top_k_beyond": "k must lie between 1 and 30",
        "merged_counts": "2 lse and 3 local_out",
    }
    _results(sim, "infer_caches.py", refused)


def test_delta_rule_latent_and_sparse_attention(sim: Sim) -> None:
    refused = {
        "recurrent_scale": "scale cannot be empty",
        "recurrent_slots": "npu_recurrent_gated_delta_rule without ssm_state_indices is not simulated",
        "recurrent_float": "query, key and value must be bfloat16",
        "recurrent_beyond": "state has 5 blocks",
        "chunked_state_missing": "initial_state cannot be empty",
        "prolog_quantised": "npu_mla_prolog_v3 with weight_quant_mode is not simulated",
        "prolog_mode": "cache_mode BSND is unknown",
        "indexer_mode": "npu_lightning_indexer with sparse_mode 1 is not simulated",
        "sparse_attention_mode": "with attention_mode 0 is not simulated",
        "sparse_beyond": "sparse_indices names block",
        "sparse_float8": "with key of .*[Ff]loat8.* is not simulated",
    }
    _results(sim, "infer_models.py", refused)
