#!/usr/bin/env python3
"""Write the models of models.yaml as sparse directories: `python deploy/examples/make_models.py DIR`.

Each gets a real config.json and real safetensors headers with every tensor of its architecture; where the
weights would be there are holes, so that 1.1 TB of models take some 25 MB of disk. DIR/models.yaml then
holds the same models with these directories as their source: `gpustackd apply -f DIR/models.yaml`.
"""

import argparse
import pathlib

from gpustackd.demo.models.catalogue import write_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path, help="where to write them")
    into = parser.parse_args().directory
    path = write_models(into, tell=lambda name, size: print(f"{size / 1e9:8.1f} GB  {name}", flush=True))
    print(f"\nnext: gpustackd apply -f {path}")


if __name__ == "__main__":
    main()
