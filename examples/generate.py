"""How many tokens a second a causal language model of Hugging Face decodes, dense and made 2:4, by the same loop.

python examples/generate.py [folder of a model] [--method sparsegpt] [--batch 4] [--text a file of text]

Without a folder it decodes with a small Llama of random weights, whose words say nothing.
"""

import argparse
import contextlib
import copy
import fnmatch
import inspect
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, StaticCache

from blockshock_lib import Sparse24, sparsify_
from blockshock_lib.errors import BlockShockError, first_line

SMALL = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
PROMPT = 32  # tokens


class Decoder:
    """Greedy decoding with a static cache; on a GPU a step is one CUDA graph, compiled before if asked."""

    def __init__(self, model, prompt, tokens, compiled=False):
        self.model, self.prompt, self.tokens = model, prompt, tokens
        self.length, device = prompt.shape[1] + tokens, prompt.device
        how = {"mode": "max-autotune-no-cudagraphs"} if prompt.is_cuda else {"backend": "aot_eager"}
        self.next = torch.compile(model, fullgraph=True, dynamic=False, **how) if compiled else model
        self.cache = StaticCache(config=model.config, max_cache_len=self.length)
        self.token, self.position = prompt[:, :1].clone(), torch.zeros(1, dtype=torch.long, device=device)
        self.places, self.graph = torch.arange(self.length, device=device), None

    def step(self):
        mask = (self.places <= self.position).expand(len(self.prompt), 1, 1, -1)
        logits = self.next(
            input_ids=self.token,
            position_ids=self.position.expand(len(self.prompt), 1),
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position += 1

    def prefill(self):
        self.cache.reset()
        logits = self.model(input_ids=self.prompt, past_key_values=self.cache, use_cache=True).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.fill_(self.prompt.shape[1])

    def capture(self):
        self.prefill()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()  # what is made at a first call is made before the graph
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    @torch.no_grad()
    def __call__(self):
        """(tokens [B, T], seconds of all steps after the first token)."""
        if self.prompt.is_cuda and self.graph is None:
            self.capture()
        self.prefill()
        found, wait = [self.token.clone()], torch.cuda.synchronize if self.prompt.is_cuda else lambda: None
        wait()
        start = time.perf_counter()
        for _ in range(self.tokens - 1):
            self.graph.replay() if self.graph else self.step()
            found.append(self.token.clone())
        wait()
        return torch.cat(found, 1), time.perf_counter() - start


@torch.no_grad()
def nats(model, batches):
    """The mean loss of the next token."""
    losses = [F.cross_entropy(model(b).logits[:, :-1].flatten(0, 1).float(), b[:, 1:].flatten()) for b in batches]
    return torch.stack(losses).mean().item()


def loaded(folder, device, dtype):
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, **SMALL)).to(device, dtype).eval()


def unfit(model, prompt, tokens):
    """Why the loop above would not decode with this model as it does itself; "" where it does."""
    config, takes = model.config.get_text_config(), inspect.signature(model.forward).parameters
    if model._is_stateful or not {"past_key_values", "position_ids", "attention_mask"} <= takes.keys():
        return (
            f"{type(model).__name__} takes no static cache with positions and a mask: this example needs one that does"
        )
    if (length := prompt + tokens) > config.max_position_embeddings:
        has = f"the model has {config.max_position_embeddings}"
        return f"as --tokens {tokens} after a prompt of {prompt} needs {length} positions, and {has}"
    windows = {name: getattr(config, name, None) for name in ("sliding_window", "window_size", "attention_chunk_size")}
    for name, window in windows.items():
        if window and window < length:
            wanted = f"prompt and --tokens are {length}: leave out --tokens beyond {window - prompt}"
            return f"the model attends to {window} tokens ({name}), and {wanted}"
    return ""


def filter_of(model):
    names = [name for name, _ in model.named_modules()]
    return next((one for one in ("*.layers.*", "*.h.*") if fnmatch.filter(names, one)), "*.layers.*")


def batches_of(args, model, device):
    """Rows of 256 tokens of the text, or of random tokens where there is no tokenizer."""
    size = min(256, model.config.max_position_embeddings)
    if args.folder:
        ids = AutoTokenizer.from_pretrained(args.folder)(args.text.read_text(), return_tensors="pt").input_ids[0]
    else:
        ids = torch.randint(model.config.vocab_size, (32 * size,), generator=torch.Generator().manual_seed(1))
    rows = ids[: len(ids) // size * size].view(-1, size).to(device)
    return list(rows[: args.calibration + 16].split(4))


def least(number):
    """What reads an argument as a whole number from this one on."""

    def read(text):
        if not text.lstrip("-").isdecimal() or int(text) < number:
            raise argparse.ArgumentTypeError(f"{text}: a whole number from {number} on")
        return int(text)

    return read


@contextlib.contextmanager
def told(parser, what):
    """What others raise as one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, BlockShockError) as error:
        parser.error(f"{what}{first_line(error)}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="of a model in Hugging Face's form")
    parser.add_argument("--method", default="magnitude", choices=Sparse24.methods)
    parser.add_argument("--filter", help='which layers; without it "*.layers.*", or "*.h.*", as in GPT-2')
    parser.add_argument("--batch", type=least(1), default=1)
    parser.add_argument("--tokens", type=least(2), default=64)
    parser.add_argument("--repeats", type=least(1), default=5)
    parser.add_argument("--compile", action="store_true", help="the steps of both models by torch.compile")
    parser.add_argument("--calibration", type=least(0), default=128, help="rows of 256 tokens")
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(__file__).parents[1] / "README.md",
        help="of perplexity, and of wanda's and sparsegpt's calibration, for which README.md is too short",
    )
    args = parser.parse_args(argv)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)

    if args.folder and not Path(args.folder).is_dir():
        parser.error(f"{args.folder} is no folder")
    if not args.text.is_file():
        parser.error(f"--text {args.text} is no file")
    with told(parser, f"{args.folder} cannot be read as a model: "):
        dense = loaded(args.folder, device, dtype)
    if why := unfit(dense, PROMPT, args.tokens):
        parser.error(why)
    with told(parser, f"{args.folder} cannot be read as a tokenizer: "):
        batches = batches_of(args, dense, device)
    held, rest = batches[:4], batches[4:]
    calibration = rest if args.method in ("wanda", "sparsegpt") else None
    if not held or calibration == []:
        parser.error("too little --text: perplexity takes 16 rows of 256 tokens, and calibration those beyond")
    sparse, start = copy.deepcopy(dense), time.perf_counter()
    with told(parser, ""):
        print(sparsify_(sparse, Sparse24(args.method), args.filter or filter_of(sparse), calibration))
    print(f"pruned by {args.method} in {time.perf_counter() - start:.1f} s")

    prompt = held[0][:1, :PROMPT].expand(args.batch, -1).contiguous()
    for module in sparse.modules():  # which 2:4 kernel is the fastest for this batch: searched once, and kept
        if device == "cuda" and hasattr(module, "tune"):
            module.tune(torch.randn(args.batch, module.in_features, device=device, dtype=dtype))
    models = {"dense": dense, "2:4": sparse}
    decoders = {name: Decoder(model, prompt, args.tokens, args.compile) for name, model in models.items()}
    found, seconds = {}, {name: [] for name in decoders}
    for _ in range(args.repeats + 1):  # in turns; the first is thrown away
        for name, decoder in decoders.items():
            found[name], took = decoder()
            seconds[name].append(took)
    rates = {k: args.batch * (args.tokens - 1) / statistics.median(took[1:]) for k, took in seconds.items()}
    same = (found["dense"] == found["2:4"]).all(0).long().cumprod(0).sum().item()
    losses = {"dense": nats(dense, held), "2:4": nats(sparse, held)}
    if device == "cpu":
        print("on a CPU: these rates say nothing about speed")
    if not args.folder:
        print("random weights: perplexities and tokens that agree say nothing about accuracy")
    for name, rate in rates.items():
        print(f"{name:5}  {rate:9.1f} tokens/s  perplexity {torch.tensor(losses[name]).exp():.2f}")
    print(f"2:4 over dense: {rates['2:4'] / rates['dense']:.2f}x; first {same} of {args.tokens} greedy tokens agree")


if __name__ == "__main__":
    main()
