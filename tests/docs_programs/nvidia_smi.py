"""`nvidia-smi` of a DGX H100, as far as the documents use it: prints the part of examples/topo.txt that it is asked for."""

import sys
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "topo.txt"


def main(arguments: list[str]) -> int:
    """Print what one of the two known questions has for an answer; 2 for any other question."""
    topology, _, gpus = SAMPLE.read_text().partition("\nGPU 0: ")
    answers = {("topo", "-m"): f"{topology}\n", ("-L",): f"GPU 0: {gpus}"}
    if tuple(arguments) not in answers:
        print(f"nvidia-smi: this stand-in has no record of {arguments}", file=sys.stderr)
        return 2
    sys.stdout.write(answers[tuple(arguments)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
