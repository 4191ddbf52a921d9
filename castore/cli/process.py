"""`castore process`: sends files through a recipe's operators, and takes unchanged steps from the cache."""

from __future__ import annotations

import os
import re
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from castore import Store
from castore.cli.output import AsJson, print_error, print_json, spinner
from castore.cli.process_bars import CurrentStep, replace_lock_of_bars, step_bars
from castore.cli.process_report import estimate_lines, print_blame, print_outcome
from castore.cli.remote_access import parse_shard
from castore.cli.signals import terminable
from castore.cli.store_access import store_path
from castore.errors import CastoreError, InvalidValueError

if TYPE_CHECKING:
    from castore.recipes import Recipe

_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _truth(text: str | None) -> bool | None:
    if text is None:
        return None
    if text.lower() not in _TRUTHS:
        raise typer.BadParameter(f"{text!r} is neither true nor false")
    return _TRUTHS[text.lower()]


def process(
    context: typer.Context,
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The recipe, in YAML.")],
    dataset_path: Annotated[
        str | None,
        typer.Option("--dataset-path", "--dataset_path", metavar="PATH", help="Files to process."),
    ] = None,
    export_path: Annotated[
        str | None,
        typer.Option("--export-path", "--export_path", metavar="PATH", help="Where the result goes."),
    ] = None,
    project_name: Annotated[
        str | None,
        typer.Option("--project-name", "--project_name", metavar="NAME", help="Whose checkpoint it is."),
    ] = None,
    text_keys: Annotated[
        str | None,
        typer.Option("--text-keys", "--text_keys", metavar="COLUMN", help="The column of the text."),
    ] = None,
    num_proc: Annotated[
        int | None,
        typer.Option("--np", "--num-proc", "--num_proc", metavar="N", help="Processes for each step."),
    ] = None,
    use_cache: Annotated[
        bool | None,
        typer.Option("--use-cache/--no-use-cache", help="Keep each step, and take what is there."),
    ] = None,
    use_cache_text: Annotated[
        str | None, typer.Option("--use_cache", metavar="true|false", help="The same, as Data-Juicer has it.")
    ] = None,
    cache_compress: Annotated[
        str | None,
        typer.Option("--cache-compress", "--cache_compress", metavar="C", help="zstd, lz4, gzip or none."),
    ] = None,
    ds_cache_dir: Annotated[
        str | None,
        typer.Option("--ds-cache-dir", "--ds_cache_dir", metavar="DIR", help="The store; as --store."),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            "--remote",
            metavar="NAME",
            help="Share steps with other nodes over it.  [default: $CASTORE_REMOTE]",
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Begin with one part of N of each step's blocks, counted from 0, where N nodes share steps. "
            'Or "job": the part of this rank, by the variables of torchrun or Slurm.',
        ),
    ] = "job",
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="ENGINE", help="ray: have all nodes of a Ray cluster share the work."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="ADDRESS", help="Of the Ray cluster.  [default: $RAY_ADDRESS]"),
    ] = None,
    temp_dir: Annotated[
        str | None,
        typer.Option(
            "--temp-dir", "--temp_dir", metavar="DIR", help="For uncompressed files while steps run."
        ),
    ] = None,
    use_checkpoint: Annotated[
        bool | None,
        typer.Option("--use-checkpoint/--no-use-checkpoint", help="Keep the latest step only; no cache."),
    ] = None,
    use_checkpoint_text: Annotated[
        str | None,
        typer.Option("--use_checkpoint", metavar="true|false", help="The same, as Data-Juicer has it."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only say which steps would run, and what has changed.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Only say how much disk it would take.")
    ] = False,
    blame: Annotated[
        int | None,
        typer.Option(
            "--blame", metavar="ROW", help="Only say where a row of the result comes from (0 is the first)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send files through the operators of a recipe. Options stand in for the keys of the file.

    \b
    castore process --config recipe.yaml
    castore process --config recipe.yaml --cache_compress zstd --use_cache false
    """
    os.stat(config)  # a wrong path is told at once: the imports below take seconds
    from castore import recipes

    part = _check_options(explain, estimate, blame, on, shard, address)
    folders = _find_modules(config)
    recipe = recipes.read(config).replace(
        dataset_path=dataset_path,
        export_path=export_path,
        project_name=project_name,
        text_keys=text_keys,
        num_proc=num_proc,
        use_cache=use_cache if use_cache_text is None else _truth(use_cache_text),
        cache_compress=cache_compress,
        ds_cache_dir=ds_cache_dir,
        temp_dir=temp_dir,
        use_checkpoint=use_checkpoint if use_checkpoint_text is None else _truth(use_checkpoint_text),
    )
    for note in recipe.notes:
        print_error(f"{config}: {note}")
    place = _store_of(context, recipe, ds_cache_dir)
    with terminable(), Store(place, memory=0, remote=remote) as store:
        if explain:
            _explain(recipe, store, as_json)
        elif estimate:
            _estimate(recipe, store, as_json)
        elif blame is not None:
            _show_blame(recipe, store, blame, as_json)
        else:
            if on is not None:
                _run_on_ray(recipe, store, folders, address)
            _run(recipe, store, part, as_json)


def _check_options(
    explain: bool, estimate: bool, blame: int | None, on: str | None, shard: str, address: str | None
) -> tuple[int, int] | None:
    """Check that options go together; returns the part of ``--shard``, None for that of the rank."""
    if explain and estimate:
        raise typer.BadParameter("--explain and --estimate answer two questions; ask one at a time")
    if blame is not None and (explain or estimate):
        raise typer.BadParameter("--blame answers a question of its own; ask one at a time")
    if on not in (None, "ray"):
        raise typer.BadParameter(f"--on {on}: the only engine is ray")
    part = None if shard == "job" else parse_shard(shard)
    if part is not None and on is not None:
        raise typer.BadParameter("--shard and --on ray both divide the work; give one of them")
    if address is not None and on is None:
        raise typer.BadParameter("--address is that of a Ray cluster: give --on ray, too")
    return part


def _run_on_ray(recipe: Recipe, store: Store, folders: list[str], address: str | None) -> None:
    from castore.adapters.ray import run_on_nodes

    if not recipe.use_cache:
        raise InvalidValueError("nodes share the steps that are kept: leave use_cache on")
    try:
        with spinner("running on the nodes of the Ray cluster"):
            run_on_nodes(partial(_run_on_node, recipe, folders), store, cpus=recipe.num_proc, address=address)
    except (CastoreError, OSError):
        raise
    except Exception as error:  # a user's operator may raise anything
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise CastoreError(f"a node of the cluster failed: {what}; what was done is kept") from error


def _run_on_node(recipe: Recipe, folders: list[str], store: Store) -> None:
    from castore.recipes.runner import run_steps

    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    before = os.getcwd()
    os.chdir(folders[0])  # the recipe may name files from there
    try:
        run_steps(recipe, store)
    finally:
        os.chdir(before)


def _find_modules(config: Path) -> list[str]:
    """Have operators found beside the recipe and in the working folder, as `python` does for a script."""
    folders = [os.getcwd(), os.path.dirname(os.path.abspath(config))]
    for folder in folders:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return folders


def _store_of(context: typer.Context, recipe: Recipe, given: str | None) -> Path:
    """The store: from the command line, else the recipe, else the environment, else the default."""
    source = context.find_root().get_parameter_source("store")
    on_command_line = source is not None and source.name == "COMMANDLINE"
    if given is not None and on_command_line:
        raise InvalidValueError("--store and --ds-cache-dir both name the store; give one of them")
    if recipe.ds_cache_dir is None or on_command_line:
        return store_path(context)
    return Path(recipe.ds_cache_dir)


def _run(recipe: Recipe, store: Store, shard: tuple[int, int] | None, as_json: bool) -> None:
    from castore.recipes import process as run

    replace_lock_of_bars()
    current = CurrentStep()
    try:
        with step_bars(current) as (steps, rows):
            outcome = run(recipe, store=store, shard=shard, progress=steps, exported=rows)
    except (CastoreError, OSError):
        raise
    except (Exception, SystemExit) as error:  # a user's operator may raise anything, and call exit()
        raise CastoreError(_describe_failure(error, current.name)) from error
    if as_json:
        print_json(outcome.to_dict())
    else:
        print_outcome(outcome, recipe)


def _describe_failure(error: BaseException, step: str) -> str:
    """A sentence with the step that failed, the line of the user's code, the row, and the error."""
    from castore.adapters.datasets.call_watch import OF_INPUT

    others = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__), "<")
    places = [
        (file, line)
        for file, line in _places(error)
        if "site-packages" not in file and not file.startswith(others)
    ]
    place = " at {}:{}".format(*places[-1]) if places else ""
    place += "".join(f", {note}" for note in getattr(error, "__notes__", ()) if OF_INPUT in note)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"step {step!r} failed{place}: {what}; the steps before it are kept"


def _places(error: BaseException) -> list[tuple[str, str]]:
    """Files and lines that an error has passed, the outermost first. An error of a worker process has them as
    text, in its cause.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, str(frame.lineno)) for frame in frames]
    if type(error.__cause__).__name__.endswith("RemoteTraceback"):  # of multiprocessing or its like
        places += re.findall(r'^ *File "(.+)", line (\d+)', str(error.__cause__), re.MULTILINE)
    return places


def _explain(recipe: Recipe, store: Store, as_json: bool) -> None:
    from castore.recipes import explain

    explanations = explain(recipe, store)
    if as_json:
        print_json([explanation.to_dict() for explanation in explanations])
        return
    for explanation in explanations:
        typer.echo(str(explanation))


def _show_blame(recipe: Recipe, store: Store, row: int, as_json: bool) -> None:
    from castore.recipes import blame

    found = blame(recipe, store, row)
    if as_json:
        print_json(found.to_dict())
    else:
        print_blame(found, row)


def _estimate(recipe: Recipe, store: Store, as_json: bool) -> None:
    from castore.recipes import estimate

    found = estimate(recipe, store)
    if as_json:
        print_json(found.to_dict())
        return
    for line in estimate_lines(found):
        typer.echo(line)
    for problem in found.problems:
        print_error(problem)
