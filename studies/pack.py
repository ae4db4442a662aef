"""Packs the images of `studies.corpus` into one file, which is faster to copy to another machine.

    python -m studies.pack ROOT OUT

ROOT holds office31/DOMAIN/CLASS/* and pacs/DOMAIN/CLASS/*. Office-31 is resized to 256×256 and written as WebP (quality
72); PACS, which is WebP already, is copied. OUT gets images.bin, images.json, and the weights of EfficientNet-Lite0 and
Lite2 in half precision.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from PIL import Image
from safetensors.torch import save_file

from usfan.models.backbones import create_backbone

DOMAINS = ("office31/amazon", "office31/dslr", "office31/webcam", "pacs/photo", "pacs/cartoon")


def main() -> None:
    root = Path(sys.argv[1])
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    index: list[tuple[str, str, int, int]] = []
    with open(out / "images.bin", "wb") as packed:
        for domain in DOMAINS:
            for path in sorted((root / domain).glob("*/*")):
                content = path.read_bytes()
                if domain.startswith("office31"):
                    buffer = io.BytesIO()
                    image = (
                        Image.open(path)
                        .convert("RGB")
                        .resize((256, 256), Image.Resampling.BICUBIC)
                    )
                    image.save(buffer, "webp", quality=72, method=2)
                    content = buffer.getvalue()
                index.append((domain, path.parent.name, packed.tell(), len(content)))
                packed.write(content)
    (out / "images.json").write_text(json.dumps(index))
    for number in (0, 2):
        state = create_backbone(f"tf_efficientnet_lite{number}", "offline").module.state_dict()
        half = {name: t.half() if t.is_floating_point() else t for name, t in state.items()}
        save_file(
            {name: t.contiguous() for name, t in half.items()},
            out / f"lite{number}.safetensors",
        )


if __name__ == "__main__":
    main()
