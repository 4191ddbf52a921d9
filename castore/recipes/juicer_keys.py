"""Data-Juicer's keys that castore lacks: keys that change no result, and keys that are not supported.

One table, so that a recipe never loses a key silently: each key is noted with its reason, or is an error with
a reason. Must never change the effect of a recipe.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from castore.errors import InvalidValueError


class KeyTreatment(NamedTuple):
    """A key of Data-Juicer's, and its treatment by castore.

    Attributes:
        harmless: values that request nothing; null is harmless for every key.
        reason: the reason why the key changes no result, or is not supported; the text after "since".
        noted: whether other values change no result either.
    """

    reason: str
    harmless: tuple[Any, ...] = ()
    noted: bool = False


def _note_keys(names: str, reason: str) -> dict[str, KeyTreatment]:
    return {name: KeyTreatment(reason, noted=True) for name in names.split()}


def _refuse_key(name: str, reason: str, *harmless: Any) -> dict[str, KeyTreatment]:
    return {name: KeyTreatment(reason, harmless)}


_TOKENS_REASON = "castore's operators use no special tokens, and Data-Juicer's operators get the default ones"

JUICER_KEYS: dict[str, KeyTreatment] = {
    # Keys of other programs, of Data-Juicer's scheduling and of its reports.
    **_note_keys(
        "open_tracer op_list_to_trace trace_num trace_keys open_insight_mining op_list_to_mine",
        "there is no tracer",
    ),
    **_note_keys("open_monitor event_logging event_log_dir", "there is no monitor"),
    **_note_keys(
        "op_fusion fusion_strategy mapper_fusion mapper_fusion_vram_limit adaptive_batch_size "
        "auto_op_parallelism turbo "
        "min_common_dep_num_to_combine conflict_resolve_strategy use_dag elastic_juicer_adaptive_batching "
        "elastic_juicer_profile_seed strict_preflight",
        "it only changes how Data-Juicer runs, or how fast",
    ),
    **_note_keys(
        "executor_type ray_address override_num_blocks partition partition_size partition_dir",
        "everything runs in processes of this machine",
    ),
    **_note_keys("export_in_parallel", "one process writes the result"),
    **_note_keys(
        "percentiles export_original_dataset save_stats_in_one_file", "it is for Data-Juicer's analyser alone"
    ),
    **_note_keys("data_probe_algo data_probe_ratio hpo_config", "it is for Data-Juicer's sandbox alone"),
    **_note_keys("work_dir job_id checkpoint checkpoint_dir resume", "results are in the store"),
    **_note_keys("notification annotation", "castore sends no messages"),
    **_note_keys("skip_op_error", "no error is skipped: an operator that raises an error ends the run"),
    **_note_keys(
        "validators", "the dataset is not validated: an operator that lacks its column ends the run"
    ),
    **_note_keys("auto_num auto", "it is for Data-Juicer's analyser alone"),
    # These keys would change the result, or the place of the export.
    **_refuse_key("export_shard_size", "the result is one file, or one folder of save_to_disk", 0),
    **_refuse_key("export_type", "the ending of export_path decides the format"),
    **_refuse_key("export_extra_args", "results are written in one way for each format", {}),
    **_refuse_key("export_aws_credentials", "results are written to files only"),
    **_refuse_key("keep_hashes_in_res_ds", "hashes are dropped after the deduplicator that made them", False),
    **_refuse_key(
        "suffixes",
        "the endings decide which files are read; choose files with a pattern in dataset_path",
        [],
        "",
    ),
    **_refuse_key(
        "custom_operator_paths",
        "your own operators are named by their dotted paths, like my_module.MyMapper",
        [],
    ),
    **_refuse_key("generated_dataset_config", "data comes from files"),
    **_refuse_key("load_dataset_kwargs", "each kind of file is read in one way", {}),
    **_refuse_key("read_options", "each kind of file is read in one way", {}),
    **_refuse_key("load_jsonl_lenient", "a line that is no JSON is an error", False),
    **_refuse_key("decrypt_after_reading", "files are read as they are", False),
    **_refuse_key("encrypt_before_export", "results are written as they are", False),
    **_refuse_key("encryption_key_path", "files are read and written as they are"),
    **_refuse_key("image_special_token", _TOKENS_REASON, "<__dj__image>"),
    **_refuse_key("audio_special_token", _TOKENS_REASON, "<__dj__audio>"),
    **_refuse_key("video_special_token", _TOKENS_REASON, "<__dj__video>"),
    **_refuse_key("eoc_special_token", _TOKENS_REASON, "<|__dj__eoc|>"),
}


def explain_key(name: str, value: Any) -> str | None:
    """The reason why a key of Data-Juicer's changes nothing here; None if the value requests nothing.

    Raises:
        InvalidValueError: the key would change the result, and is not supported.

    >>> explain_key("open_tracer", True)
    'there is no tracer'
    >>> explain_key("export_shard_size", 0), explain_key("open_tracer", None)
    (None, None)
    >>> explain_key("export_shard_size", 1000)
    Traceback (most recent call last):
    castore.errors.InvalidValueError: export_shard_size: 1000 is not supported, since the result is one file,
    or one folder of save_to_disk; remove the key
    """
    key = JUICER_KEYS[name]
    if value is None or any(
        value is same or (value == same and type(value) is type(same)) for same in key.harmless
    ):
        return None
    if key.noted:
        return None if value is False or value == [] else key.reason
    shown = repr(value) if len(repr(value)) <= 60 else "..."
    shown = {"True": "true", "False": "false"}.get(shown, shown)
    raise InvalidValueError(f"{name}: {shown} is not supported, since {key.reason}; remove the key")
