"""examples/finetune.py runs, and fine-tuning raises the certified accuracy."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/finetune.py"


def test_fine_tuning_raises_the_certified_accuracy(tmp_path: Path) -> None:
    spec = spec_from_file_location("finetune", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    example.TRAINED, example.TESTED = 1024, 8
    before, after = example.main(tmp_path)
    assert after > before + 0.1
