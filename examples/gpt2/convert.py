"""Models from and for Hugging Face: python -m examples.gpt2.convert -h."""

from pathlib import Path

import tyro

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokens import new_folder
from examples.gpt2.model import hugging_face
from examples.gpt2.model.files import load_model, save_model
from examples.gpt2.run.command import exit_on_error


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Args:
    args: Arguments; those of the process by default.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a file that
      cannot be read or written, and 130 after control-C.
  """
  with exit_on_error():
    tyro.extras.subcommand_cli_from_dict(
      {'export': export_model, 'import': import_model},
      args=args,
      prog='python -m examples.gpt2.convert',
      description='Turns models into and out of folders of Hugging Face.',
    )


def export_model(
  folder: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]
) -> None:
  """Writes a model for GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder of a finished run or of an imported model.
    out: Folder of the result: a new or an empty one.

  Raises:
    UsageError: If a folder is wrong, or Hugging Face has no such model.
    OSError: If a file cannot be read or written.
  """
  with new_folder(out.expanduser().resolve()) as scratch:
    model = load_model(folder)
    if model.config.qk_norm:
      raise UsageError(
        f'{folder} has qk_norm, which neither GPT2LMHeadModel nor '
        'LlamaForCausalLM has: only a model without it can be exported.'
      )
    hugging_face.write_model(scratch, model)


def import_model(
  folder: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]
) -> None:
  """Reads a GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder with config.json, model.safetensors (or its parts and their
      index) and perhaps tokenizer.json.
    out: Folder of the result, a new or an empty one: a model folder, for
      examples.gpt2.generate, evaluate, and train with --init-from.

  Raises:
    UsageError: If a folder is wrong, or the model is another than ours.
    OSError: If a file cannot be read or written.
  """
  with new_folder(out.expanduser().resolve()) as scratch:
    save_model(scratch, hugging_face.read_model(folder.expanduser()))


if __name__ == '__main__':
  main()
