#!/usr/bin/env python3
"""Compiles the kernels here to PTX, into ptx/, which is committed: Hob compiles nothing when it runs.

Run it after a change of a kernel (a test tells when it was forgotten):

    python3 -m pip download --no-deps -d WHEELS nvidia-cuda-nvrtc-cu12==12.4.127 nvidia-cuda-runtime-cu12==12.4.127
    python3 core/src/nn/cuda/compile.py WHEELS

The oldest release that knows what the kernels use is taken: PTX of a newer one is refused by older drivers. 8.0 is the first compute
capability with bfloat16.
"""

import ctypes
import hashlib
import pathlib
import re
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).parent
TYPES = {"bf16": "__nv_bfloat16", "f16": "__half", "f32": "float"}
SIXTEEN = ["bf16", "f16"]
# Name, source, types, further definitions. float16 is too narrow for numbers that are not divided yet: only bfloat16 normalises inside.
KERNELS = [
    *[(f"product_{name}", "product", name, {}) for name in SIXTEEN],
    *[(f"{kernel}_{name}", kernel, name, {"NORM": name == "bf16"}) for kernel in ("projections", "gated") for name in SIXTEEN],
    *[(f"attend_{name}_{width}", "attend", name, {"D": width}) for name in TYPES for width in (32, 64, 96, 128, 256)],
    *[(f"join_chunks_{name}", "join_chunks", name, {}) for name in TYPES],
]


def sources() -> str:
    """What the PTX depends on, as nn/cuda.rs computes it."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.cu"), *HERE.glob("*.cuh")], key=lambda path: path.name):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for wheel in pathlib.Path(sys.argv[1]).glob("*12.4.127*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
        root = pathlib.Path(folder) / "nvidia"
        nvrtc = ctypes.CDLL(str(root / "cuda_nvrtc/lib/libnvrtc.so.12"))
        for name, source, number, definitions in KERNELS:
            options = [
                "--gpu-architecture=compute_80",
                "--std=c++17",
                "-default-device",
                f"-I{root / 'cuda_runtime/include'}",
                f"-I{HERE}",
                f"-DNUMBER={TYPES[number]}",
                *[f"-D{key}={int(value)}" for key, value in definitions.items()],
            ]
            ptx = compiled(nvrtc, (HERE / f"{source}.cu").read_text(), options)
            (HERE / "ptx").mkdir(exist_ok=True)
            text = f"//{sources()}\n{brief(ptx)}"
            (HERE / "ptx" / f"{name}.ptx").write_text(text)
            print(name, len(text), "bytes")


def brief(ptx: str) -> str:
    """MLX copies and hashes the text at every call: without comments and long names it is half as long."""
    text = re.sub(r"//[^\n]*", "", ptx)
    long = sorted(set(re.findall(r"_Z\w+|\w+_param_\d+|\$L__BB\w+", text)), key=lambda name: (-len(name), name))
    for index, name in enumerate(long):
        text = re.sub(re.escape(name) + r"\b", f"$L{index}" if name.startswith("$") else f"n{index}", text)
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?([,;:{}()\[\]]) ?", r"\1", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"


def compiled(nvrtc: ctypes.CDLL, source: str, options: list[str]) -> str:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    text = fetched(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program, size)
    if status:
        sys.exit(text)
    return fetched(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program, size)


def fetched(measure, read, program, size) -> str:
    check(measure(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    check(read(program, buffer))
    return buffer.value.decode()


def check(status: int) -> None:
    if status:
        sys.exit(f"NVRTC: error {status}")


if __name__ == "__main__":
    main()
