"""The command line `fastrl`: its subcommands (`fastrl.commands`), and what a user's error looks like."""

import os
import sys
import warnings

import tyro

from fastrl.commands import comparing, insight, setup, training

# Read when torch and transformers are loaded. Waiting threads that spin for long cost a busy CPU most;
# threads that never spin cost small models a third of their time.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "5000",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
EXTRAS = {
    **dict.fromkeys(
        (
            "torch",
            "transformers",
            "trl",
            "accelerate",
            "datasets",
            "tokenizers",
            "PIL",
            "math_verify",
        ),
        "trl",
    ),
    **dict.fromkeys(("matplotlib", "pyarrow", "jinja2", "markupsafe"), "report"),
}

app = tyro.extras.SubcommandApp()
app.command(training.train)
app.command(comparing.compare)
app.command(insight.analyze)
app.command(name="eval")(training.evaluate)
app.command(setup.data)
app.command(insight.simulate)
app.command(insight.diagnose)
app.command(insight.report)
app.command(setup.config)
app.command(setup.doctor)


def set_environment() -> None:
    """Set what torch and transformers read when they are loaded; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def main() -> int:
    """Run the command line and return its exit code: 0, 1 (doctor found a problem) or 2 (a user's error)."""
    set_environment()
    # What the next major version of transformers renames is no news to somebody who trains.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    try:
        return app.cli(prog="fastrl", description="GRPO on the rollouts that teach something.") or 0
    except ValueError as error:
        from fastrl.types import FastRLError

        if not isinstance(error, FastRLError):
            raise
        print(f"fastrl: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f'fastrl: {error.name} is missing: pip install "fastrl-grpo[{extra}]"', file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
