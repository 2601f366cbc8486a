"""An AICI engine in Python drives `sapwood aicirt`: PyPI `posix_ipc`, semaphores, P1."""

import json
import pathlib
import struct
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import checks
from engine import AiciError, Engine

EOS = 2


def vocabulary():
    """A tokenizer.json of 259 byte tokens and three special ones."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shown, moved = {}, 256
    for byte in range(256):
        if byte in printable:
            shown[byte] = chr(byte)
        else:
            shown[byte] = chr(moved)
            moved += 1
    special = ["<unk>", "<s>", "</s>"]
    vocab = {text: index for index, text in enumerate([*special, *(shown[byte] for byte in range(256))])}
    added = [
        {"id": index, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for index, text in enumerate(special)
    ]
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return {
        "version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": step,
        "post_processor": None, "decoder": step, "model": model,
    }  # fmt: skip


def number(value):
    """An unsigned number of a Wasm file."""
    encoded = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        encoded.append(low | (0x80 if value else 0))
        if not value:
            return bytes(encoded)


def signed(value):
    """A signed number of a Wasm file."""
    encoded = bytearray()
    while True:
        low, value = value & 0x7F, value >> 7
        if (value == 0 and not low & 0x40) or (value == -1 and low & 0x40):
            return bytes([*encoded, low])
        encoded.append(low | 0x80)


def vector(items):
    return number(len(items)) + b"".join(items)


def name(text):
    return number(len(text)) + text.encode()


def controller(token):
    """A Wasm module that allows only `token`, and stops after it: what a compiler would write, byte by byte."""
    texts = {8: '{"num_forks":1,"suspend":false,"ff_tokens":[]}', 64: '{"SampleWithBias":{}}', 112: '{"stop":true}', 0: "{}"}
    const = lambda value: b"\x41" + signed(value)  # noqa: E731
    result = lambda at: const(at) + const(len(texts[at])) + b"\x10\x00"  # noqa: E731
    bits = struct.unpack("<i", struct.pack("<I", 1 << token % 32))[0]
    mid = const(1024 + token // 32 * 4) + const(bits) + b"\x36\x02\x00" + const(1024) + b"\x10\x01" + result(64)
    bodies = [const(1), result(0), result(8), mid, result(112)]
    exports = ["aici_create", "aici_init_prompt", "aici_pre_process", "aici_mid_process", "aici_post_process"]
    types = [b"\x60\x02\x7f\x7f\x00", b"\x60\x01\x7f\x00", b"\x60\x00\x01\x7f"]
    imports = [("aici_host_return_process_result", 0), ("aici_host_return_logit_bias", 1)]
    sections = {
        1: vector(types),
        2: vector([name("env") + name(it) + b"\x00" + number(kind) for it, kind in imports]),
        3: vector([number(2), *[number(1)] * 4]),
        5: vector([b"\x00\x01"]),
        7: vector([name("memory") + b"\x02\x00", *[name(it) + b"\x00" + number(2 + at) for at, it in enumerate(exports)]]),
        10: vector([number(len(body) + 2) + b"\x00" + body + b"\x0b" for body in bodies]),
        11: vector([b"\x00" + const(at) + b"\x0b" + name(text) for at, text in texts.items()]),
    }
    return b"\0asm\1\0\0\0" + b"".join(bytes([kind]) + number(len(body)) + body for kind, body in sections.items())


class World:
    def __init__(self, options):
        self.binary = str(pathlib.Path(options.sapwood).resolve())
        # Beside the packages of this client, not in a folder for temporary files, which may not allow programs.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="aici-", dir=sys.prefix))
        self.tokenizer = self.folder / "bytes.json"
        self.tokenizer.write_text(json.dumps(vocabulary()))

    def engine(self, *flags):
        return Engine([self.binary, "aicirt"], str(self.tokenizer), flags, cwd=self.folder)


def the_controller_decides_the_text(world):
    for flags in ((), ("--isolation", "sequence"), ("--isolation", "shared")):
        with world.engine(*flags) as engine:
            assert engine.vocab_size == 259
            engine.tag("bang-latest", engine.upload(controller(36)))
            assert engine.generate("bang-latest", prompt=[1]) == [36]
            tags = [tag["tag"] for tag in engine.side("get_tags")["tags"]]
            assert "bang-latest" in tags, tags


def rows_are_added_to_logits(world):
    with world.engine() as engine:
        engine.tag("bang-latest", engine.upload(controller(36)))
        engine.instantiate("r", "bang-latest", [1], "")
        engine.post_pre_process(pre_ops=[{"id": 7, "req_id": "r"}])
        seqs, [unknown, row] = engine.mid_process([{"id": 9}, {"id": 7}])
        assert seqs["9"]["error"] == "Worker: invalid id 9", seqs
        assert set(unknown) == {0.0}
        assert [at for at, value in enumerate(row) if value == 0.0] == [36]
        assert set(row) == {0.0, -100.0}


def a_wrong_request_changes_nothing(world):
    with world.engine() as engine:
        engine.tag("bang-latest", engine.upload(controller(36)))
        engine.instantiate("r", "bang-latest", [1], "")
        engine.post_pre_process(pre_ops=[{"id": 1, "req_id": "r"}])
        try:
            engine.post_pre_process(post_ops=[{"id": 99, "tokens": [1]}], freed=[1])
            raise AssertionError("it was accepted")
        except AiciError as error:
            assert str(error) == "invalid id 99", error
        assert "1" in engine.post_pre_process()["pre_seqs"]


def it_stops_when_it_is_asked_to(world):
    engine = world.engine()
    engine.requests.send({"op": "stop"})
    assert engine.runtime.wait(30) == 0
    engine.close()
    with world.engine() as engine:
        pass
    assert engine.runtime.returncode == 0


if __name__ == "__main__":
    every = [
        the_controller_decides_the_text,
        rows_are_added_to_logits,
        a_wrong_request_changes_nothing,
        it_stops_when_it_is_asked_to,
    ]
    sys.exit(checks.main(__doc__, World, every))
