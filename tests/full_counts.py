"""What the fast profile leaves to `make proof`: full counts, and the longest tests."""

import os

PROOF = os.environ.get("LOCKSTEP_PROOF") == "1"
"""True under `make proof`."""

LEFT_TO_PROOF = {
    "cpu/doctor/test_doctor_benchmark.py": ("test_the_benchmark_runs_every_check",),
    "cpu/engines/test_decode_graph.py": (
        "test_a_size_and_a_rule_are_captured_once_and_replayed_in_every_step",
        "test_an_abort_and_a_pause_between_two_steps_change_no_token_of_the_others",
        "test_memory_that_is_allocated_again_is_captured_again",
        "test_rules_beyond_the_first_few_draw_behind_a_graph_that_they_share",
    ),
    "cpu/ops/test_cuda_ops_interpreted.py": (
        "test_a_models_log_probs_are_the_same_bits_in_steps_and_packed[gpt_oss-0]",
        "test_a_models_log_probs_are_the_same_bits_in_steps_and_packed[gpt_oss-1073741824]",
    ),
    "cpu/ops/test_cuda_selftest.py": (
        "test_the_self_test_proves_the_kernels_and_finds_a_defect[tile]",
    ),
    "cpu/run/test_model_card.py": (
        "test_an_export_is_kept_when_the_hub_is_out_of_reach_and_uploaded_when_it_is_back",
    ),
    "cpu/run/test_run_faults.py": ("test_a_run_resumes_at_the_border_of_an_epoch",),
    "cpu/test_adapters_side_by_side.py": (
        "test_a_token_has_the_bits_of_its_adapter_alone_and_of_its_training[gpt_oss-float32-True]",
        "test_a_token_has_the_bits_of_its_adapter_alone_and_of_its_training[qwen3-bfloat16-True]",
        "test_floods_crashes_and_nans_of_an_adapter_leave_anothers_tokens_and_weights_as_they_are",
    ),
    "cpu/test_claims.py": ("test_a_study_goes_on_from_its_results_and_runs_a_changed_arm_anew",),
    "cpu/test_determinism.py": (
        "test_a_killed_run_resumes_and_ends_as_if_it_had_never_stopped[1]",
        "test_the_same_seed_is_the_same_run[threads=2 group_size=8]",
    ),
    "cpu/test_gpu_proof.py": ("test_a_case_leaves_its_figures_and_is_left_out_when_it_is_resumed",),
    "cpu/test_math_runs.py": (
        "test_both_sides_agree_in_every_bit_and_a_run_goes_on_from_its_checkpoint[retool]",
        "test_without_the_tool_the_same_model_is_worth_less",
    ),
    "cpu/test_notebooks.py": (
        "test_a_notebook_runs_in_a_kernel_and_keeps_its_chart[own_task.ipynb]",
    ),
    "cpu/test_routing_replay_run.py": ("test_replay_takes_the_flips_of_a_noisy_router_away",),
    "cpu/test_soak.py": (
        "test_a_run_that_is_killed_ends_as_one_that_is_not[0.35]",
        "test_nothing_that_a_hook_does_ends_or_hangs_a_run[harness]",
    ),
    "cpu/test_truncated_run.py": (
        "test_sampler_and_trainer_agree_over_the_recorded_support[filters1]",
    ),
    "cpu/test_wheel.py": ("test_the_quickstart_its_report_and_the_doctor_run_from_the_wheel",),
    "cpu/testing/test_faulty_engines.py": (
        "test_noise_on_both_sides_has_the_sizes_that_are_told_of_a_large_mixture",
    ),
    "multi/test_critic_over_ranks.py": (
        "test_a_run_over_two_processes_reports_and_resumes_as_one_of_its_own",
    ),
    "multi/test_engine_workers.py": (
        "test_an_engine_that_is_killed_comes_back_and_the_run_goes_on",
        "test_each_of_two_ranks_samples_with_its_own_part_of_the_engines",
    ),
    "multi/test_parallel_runs.py": (
        "test_a_teacher_tells_two_processes_what_it_tells_one[top_k]",
        "test_ctrl_c_leaves_a_checkpoint_that_one_process_goes_on_from",
        "test_ranks_with_other_settings_end_with_one_error_that_names_them",
    ),
    "multi/test_ray.py": ("test_a_run_outlives_a_killed_engine_and_ends_with_ctrl_c",),
    "parity/test_doctor_fallback.py": ("test_a_defect_of_another_architecture_is_named[phi3]",),
    "parity/test_real_recipes.py": (
        "test_the_recipe_trains_a_tiny_model_of_qwen3s_form[retool-dapo]",
    ),
    "parity/test_tokenizer_parity.py": (
        "test_ids_are_those_of_the_shipped_tokenizer_and_give_every_byte_back[gemma3]",
    ),
}
"""File -> its tests of 15 seconds and more on two busy cores, beside which others of the same kind
stay. Without them the fast profile takes two thirds of the time."""
