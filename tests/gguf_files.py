"""A tiny Llama with a byte-level vocabulary, as GGUF files of any kind."""

import gguf
import numpy as np

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "1 2", "Ġ Ġ", "Ġ w", "Ġw o")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WIDTH, HEADS, INNER, LAYERS = 64, 4, 128, 2
VOCABULARY = 320


def alphabet():
    """The 256 characters that byte-level BPE writes for bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return [*map(chr, plain), *(chr(256 + at) for at in range(len(others)))]


def write_gguf(path, *, kind="Q8_0", split="smollm", architecture="llama", without=(), **keys):
    """Writes the model. kind: of its matrices. without: tensors that are left out. keys: more
    fields, with `.` written as `__`. Returns the path."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    tokens = [*CONTROL, *alphabet(), *("".join(merge.split()) for merge in MERGES)]
    unused = [f"<|unused_{at}|>" for at in range(VOCABULARY - len(tokens))]
    types = [gguf.TokenType.CONTROL] * len(CONTROL)
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(CONTROL))
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    if split:
        writer.add_tokenizer_pre(split)
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([*types, *[gguf.TokenType.CONTROL] * len(unused)])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, value in keys.items():
        writer.add_uint32(name.replace("__", "."), value)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (VOCABULARY, WIDTH)}
    for at in range(LAYERS):
        shapes |= {
            f"blk.{at}.attn_q": (WIDTH, WIDTH),
            f"blk.{at}.attn_k": (WIDTH // 2, WIDTH),
            f"blk.{at}.attn_v": (WIDTH // 2, WIDTH),
            f"blk.{at}.attn_output": (WIDTH, WIDTH),
            f"blk.{at}.ffn_gate": (INNER, WIDTH),
            f"blk.{at}.ffn_up": (INNER, WIDTH),
            f"blk.{at}.ffn_down": (WIDTH, INNER),
        }
    norms = ["output_norm", *(f"blk.{i}.{n}_norm" for i in range(LAYERS) for n in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", draw.normal(1, 0.1, WIDTH).astype(np.float32))
    number = gguf.GGMLQuantizationType[kind]
    for name, shape in shapes.items():
        if name not in without:
            values = draw.normal(0, 0.1, shape).astype(np.float32)
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
