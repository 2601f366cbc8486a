"""The engine side of the AICI protocol, P1 over semaphores, in Python: PyPI `posix_ipc` and the standard library.

An engine creates the shared objects, starts the runtime as its child, and drives it:

    with Engine(["sapwood", "aicirt"], tokenizer="tokenizer.json") as engine:
        engine.tag("yes-latest", engine.upload(wasm))
        engine.instantiate("r1", "yes-latest", prompt=[1], arg="")
        engine.post_pre_process(pre_ops=[{"id": 1, "req_id": "r1"}])
        rows = engine.mid_process([{"id": 1}])     # one list of numbers for each op, to be added to the logits

Run as a program it generates one text with random logits, from the controller of a file.
"""

import array
import base64
import json
import mmap
import os
import struct
import subprocess

import posix_ipc

TIMEOUT_S = 30
MESSAGE_MIB = 8
MASK_MIB = 16


class AiciError(Exception):
    """The runtime refused a request."""


class Channel:
    """One direction: a region with a length and bytes, `wr` while it is free, `rd` while it is full."""

    def __init__(self, name, size):
        self.names = (f"{name}-shm", f"{name}-wr", f"{name}-rd")
        self.unlink()
        memory = posix_ipc.SharedMemory(self.names[0], posix_ipc.O_CREX, mode=0o600, size=size)
        self.map = mmap.mmap(memory.fd, size)
        memory.close_fd()
        self.wr = posix_ipc.Semaphore(self.names[1], posix_ipc.O_CREX, mode=0o600, initial_value=1)
        self.rd = posix_ipc.Semaphore(self.names[2], posix_ipc.O_CREX, mode=0o600, initial_value=0)

    def send(self, message):
        data = json.dumps(message).encode()
        if len(data) + 4 > len(self.map):
            raise AiciError(f"msg too large; {len(data)} + 4 > {len(self.map)}")
        self.wr.acquire(TIMEOUT_S)
        self.map[4 : 4 + len(data)] = data
        self.map[:4] = struct.pack("<I", len(data))
        self.rd.release()

    def receive(self):
        self.rd.acquire(TIMEOUT_S)
        (size,) = struct.unpack("<I", self.map[:4])
        data = self.map[4 : 4 + size]
        self.map[:4] = bytes(4)
        self.wr.release()
        return json.loads(data)

    def unlink(self):
        for remove, name in zip((posix_ipc.unlink_shared_memory, *[posix_ipc.unlink_semaphore] * 2), self.names):
            try:
                remove(name)
            except posix_ipc.ExistentialError:
                pass


class Engine:
    """A runtime and its channels. All objects are removed at the end, whatever happens."""

    def __init__(self, runtime, tokenizer, flags=(), cwd=None):
        self.prefix = f"/py{os.getpid()}.{id(self) % 1000}-"
        self.channels = [
            Channel(self.prefix + name, MESSAGE_MIB << 20) for name in ("cmd", "resp", "cmd-side", "resp-side")
        ]
        self.requests, self.responses, self.side_requests, self.side_responses = self.channels
        memory = posix_ipc.SharedMemory(self.prefix + "bin-shm", posix_ipc.O_CREX, mode=0o600, size=MASK_MIB << 20)
        self.masks = mmap.mmap(memory.fd, MASK_MIB << 20)
        memory.close_fd()
        self.rids = 0
        flags = [*flags, f"--json-size={MESSAGE_MIB}", f"--bin-size={MASK_MIB}", "--name", self.prefix]
        self.runtime = None
        try:
            self.runtime = subprocess.Popen([*runtime, "--server", "--tokenizer", tokenizer, *flags], cwd=cwd)
            assert self.main("ping") == {"pong": 1}
            self.vocab_size = self.main("tokens")["vocab_size"]
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Stops the runtime; returns its exit code, or None if it was never started."""
        try:
            return self.stop() if self.runtime else None
        finally:
            for channel in self.channels:
                channel.unlink()
            try:
                posix_ipc.unlink_shared_memory(self.prefix + "bin-shm")
            except posix_ipc.ExistentialError:
                pass

    def stop(self):
        if self.runtime.poll() is None:
            self.runtime.terminate()
        try:
            return self.runtime.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.runtime.kill()
            return self.runtime.wait()

    def main(self, op, **members):
        """One request of the main channel: strictly one after the other."""
        self.requests.send({"op": op, **members})
        return data_of(self.responses.receive())

    def side(self, op, **members):
        """One request of the side channel. Answers may come in another order; here there is one at a time."""
        self.rids += 1
        rid = str(self.rids)
        auth = {"user": "localhost", "is_admin": True}
        self.side_requests.send({"$rid": rid, "$auth": auth, "op": op, **members})
        answer = self.side_responses.receive()
        assert answer["$rid"] == rid, answer
        return data_of(answer)

    def upload(self, module):
        return self.side("mk_module", binary=base64.b64encode(module).decode())["module_id"]

    def tag(self, tag, module_id):
        return self.side("set_tags", module_id=module_id, tags=[tag])["tags"]

    def instantiate(self, request, controller, prompt, arg):
        self.side("instantiate", req_id=request, module_id=controller, prompt=prompt, module_arg=arg)

    def post_pre_process(self, post_ops=(), pre_ops=(), freed=()):
        ops = {"post_ops": list(post_ops), "pre_ops": list(pre_ops), "freed": list(freed)}
        return self.main("post_pre_process", **ops)

    def mid_process(self, ops):
        """The results by id, and a row of numbers for each op."""
        seqs = self.main("mid_process", ops=ops)["seqs"]
        size = 4 * self.vocab_size
        rows = [array.array("f", self.masks[index * size : (index + 1) * size]) for index in range(len(ops))]
        return seqs, rows

    def generate(self, controller, prompt, arg="", tokens_max=64, logits=None):
        """Generates one sequence with the logits of `logits(tokens)`; returns its tokens."""
        logits = logits or (lambda _: [0.0] * self.vocab_size)
        self.instantiate("request", controller, prompt, arg)
        pre = self.post_pre_process(pre_ops=[{"id": 1, "req_id": "request"}])["pre_seqs"]["1"]
        tokens = []
        while len(tokens) < tokens_max:
            if pre["error"]:
                raise AiciError(pre["error"])
            if pre["result"]["num_forks"] == 0:
                break
            tokens += pre["result"]["ff_tokens"]
            if pre["result"]["suspend"]:
                pre = self.post_pre_process()["pre_seqs"]["1"]
                continue
            seqs, [row] = self.mid_process([{"id": 1}])
            spliced = seqs["1"]["result"]
            if seqs["1"]["error"]:
                raise AiciError(seqs["1"]["error"])
            if spliced:
                appended, backtrack = spliced["ff_tokens"], spliced["backtrack"]
                # The sampled token is counted, and was never appended here.
                del tokens[len(tokens) - max(backtrack - 1, 0) :]
            else:
                scores = [logit + bias for logit, bias in zip(logits(tokens), row)]
                appended, backtrack = [scores.index(max(scores))], 0
            tokens += appended
            done = self.post_pre_process(post_ops=[{"id": 1, "tokens": appended, "backtrack": backtrack}])
            pre = done["pre_seqs"]["1"]
            if done["post_seqs"]["1"]["result"]["stop"]:
                break
        self.post_pre_process(freed=[1])
        return tokens


def data_of(answer):
    if answer["type"] != "ok":
        raise AiciError(answer["error"])
    return answer["data"]


if __name__ == "__main__":
    import sys

    _, tokenizer, module = sys.argv
    with Engine(["sapwood", "aicirt"], tokenizer) as engine:
        with open(module, "rb") as file:
            engine.tag("example-latest", engine.upload(file.read()))
        print(engine.generate("example-latest", prompt=[1]))
