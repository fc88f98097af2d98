"""`appliance models`: what a checkpoint is, and whether it will run here."""

from typing import TYPE_CHECKING, Annotated

import typer

from appliance.command_line import EXIT_PARTIAL, readable_errors

if TYPE_CHECKING:
    from vlm_engine.models.checking import CheckpointReport

models = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)


@models.callback()
def _root() -> None:
    pass


@models.command()
def check(
    model: Annotated[str, typer.Argument(metavar="DIR_OR_NAME", help="A checkpoint folder or a hub name.")],
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none, or int8 weights.")] = "none",
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="Size of the KV cache, as in the settings.")
    ] = None,
) -> None:
    """Tell a checkpoint's family, size and needs without loading it; exit code 1 if it does not fit."""
    with readable_errors():
        from appliance.settings import SettingsError
        from vlm_engine import EngineConfig
        from vlm_engine.models.checking import check_checkpoint

        try:
            config = EngineConfig(
                model,
                dtype=dtype,  # type: ignore[arg-type]
                device=device,
                quantization=quantization,  # type: ignore[arg-type]
                kv_cache_tokens=kv_cache_tokens,
            )
        except ValueError as error:
            raise SettingsError(str(error)) from None
        report = check_checkpoint(config)
    for name, value in _lines(report):
        typer.echo(f"{name:<20}{value}")
    if not report.fits:
        raise typer.Exit(EXIT_PARTIAL)


def _lines(report: "CheckpointReport") -> list[tuple[str, str]]:
    """What is told, line by line."""
    from vlm_engine.models.memory import gib

    images = [f"{name} {count}" for name, count in report.image_tokens.items() if count is not None]
    return [
        ("family", report.family),
        ("parameters", f"{report.num_parameters / 1e6:,.1f} million in {report.dtype}"),
        ("KV cache", f"{report.kv_bytes_per_token:,} bytes a token"),
        ("context", f"{report.max_model_len:,} tokens"),
        ("image tokens", ", ".join(images) or "reads no images"),
        ("memory", str(report.needs)),
        ("free memory", gib(report.free_bytes)),
        ("fits", _verdict(report)),
    ]


def _verdict(report: "CheckpointReport") -> str:
    if report.fits:
        return f"yes, with room for {report.num_cache_tokens:,} tokens in the KV cache"
    return f"no; {report.advice}"
