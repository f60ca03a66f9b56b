"""The command line: ``funcgrad parity``, ``funcgrad demo``, ``funcgrad bench``.

What a command needs is imported when it runs, so that one extra is enough for one command.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

_EXTRA_OF = {
    "rich": "cli",
    "typer": "cli",
    "matplotlib": "bench",
    "sklearn": "bench",
    "dp_accounting": "dp",
    "torch": "torch",
}


def main() -> None:
    """Run the command that ``sys.argv`` names and exit with its status."""
    try:
        _app()()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        sys.exit(
            f"funcgrad: this command needs {package}, which is not installed. "
            f"Install it with: pip install 'funcgrad[{_EXTRA_OF[package]}]'"
        )


def _app() -> Any:
    import typer

    app = typer.Typer(
        name="funcgrad",
        help="Every concept of PyTorch autograd as functional JAX.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.command()
    def parity(
        only: Annotated[list[str] | None, typer.Argument(help="Concepts; all, if none.")] = None,
        json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
        write_readme: Annotated[
            Path | None, typer.Option(help="File whose concept table to renew; runs nothing.")
        ] = None,
    ) -> None:
        """Run every concept in PyTorch and here, and show the largest difference."""
        from funcgrad.parity import run, update_readme

        if write_readme is not None:
            write_readme.write_text(update_readme(write_readme.read_text()))
            raise typer.Exit()
        raise typer.Exit(run(*(only or ()), json_path=json))

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for pictures and figures.")] = Path(
            "funcgrad-demo"
        ),
        quick: Annotated[bool, typer.Option("--quick", help="Train only a little.")] = False,
    ) -> None:
        """Per-sample gradients and private training on handwritten digits."""
        from funcgrad._demo import run

        raise typer.Exit(run(out, quick))

    @app.command()
    def bench(
        tasks: Annotated[list[str] | None, typer.Argument(help="All, if none.")] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Toy sizes, one turn.")] = False,
        full: Annotated[bool, typer.Option("--full", help="Over ranges of sizes too.")] = False,
        html: Annotated[bool, typer.Option("--html", help="Write one page of all.")] = False,
        json: Annotated[
            bool, typer.Option("--json", help="Print the figures as JSON, not as tables.")
        ] = False,
        model: Annotated[list[str] | None, typer.Option(help="Models; all, if none.")] = None,
        turns: Annotated[int, typer.Option(min=1, help="Calls of each contender.")] = 5,
        resume: Annotated[
            bool, typer.Option("--resume", help="Keep what an earlier run has measured alike.")
        ] = False,
        source: Annotated[
            Path | None, typer.Option("--from", help="Folder of figures to report; runs nothing.")
        ] = None,
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("funcgrad-bench"),
        write_readme: Annotated[
            Path | None, typer.Option(help="File whose cost table to renew from --from; no more.")
        ] = None,
    ) -> None:
        """Compare time and memory with other ways to the same numbers."""
        from funcgrad.bench import run, sections, update_readme

        if write_readme is not None:
            text = write_readme.read_text()
            write_readme.write_text(update_readme(text, sections(source or out)))
            raise typer.Exit()
        options: dict[str, Any] = {"models": model or (), "turns": turns, "resume": resume}
        options |= {"full": full, "html": html, "json": json, "source": source}
        raise typer.Exit(run(out, tasks or (), quick=quick, **options))

    return app
