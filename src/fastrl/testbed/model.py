"""The testbed's model: LLaVA (SigLIP tower, projector, Llama) with 1.4 M parameters, and its processor.

Real classes of transformers throughout, so that a trainer meets what it meets with a large model: image
tokens, a chat template, an image processor, left padding, a generation config.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

# The class that works on PIL images: the default one needs torchvision.
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from fastrl.data import diagrams_long
from fastrl.data.diagrams import SIZE, TRIPLES
from fastrl.data.testbed import problem_set_of

PATCH = 16
WIDTH, NUM_HEADS = 128, 4
MAX_POSITIONS = 256
PAD, END, UNKNOWN, IMAGE = "<|pad|>", "<|end|>", "<|unk|>", "<image>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
TAGS = ["<think>", "</think>", r"\boxed{", "}"]
WORDS = ["Find", "the", "angle", "length", "perimeter", "area", "x", "root", *".,+-*/="]
MORE_WORDS = {"short": [], "long": diagrams_long.WORDS.split()}  # of each problem set
LARGEST_NUMBER = 260  # every integer up to here is one token, and so is every square of a triple

# Content is a string or a list of blocks: trainers turn one into the other for vision-language models.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>{{ ' ' }}
{%- if message['content'] is string -%}
{{ message['content'] }}{{ ' ' }}
{%- else -%}
{%- for block in message['content'] -%}
{{ '<image>' if block['type'] == 'image' else block['text'] }}{{ ' ' }}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}<|end|>{{ ' ' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{ ' ' }}{%- endif -%}
"""


def checkpoint_path(problems: str = "short") -> Path:
    """The folder of the checkpoint that ships with the package for a problem set: short or long."""
    problem_set_of(problems)  # refuses an unknown name
    return Path(__file__).parent / ("checkpoint" if problems == "short" else f"checkpoint_{problems}")


def load(problems: str = "short") -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """Return the model shipped for a problem set (float32, eager attention) and its processor."""
    path = checkpoint_path(problems)
    # Eager: at this size the fused CPU kernel is slower, and much slower with bf16 products.
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model, AutoProcessor.from_pretrained(path, local_files_only=True)


def build_processor(problems: str = "short") -> LlavaProcessor:
    """Make a problem set's processor: word-level tokens, pictures at their own size, white paper as zero."""
    problem_set_of(problems)  # refuses an unknown name
    side = {"height": SIZE, "width": SIZE}
    image_processor = LlavaImageProcessorPil(
        do_resize=False,
        do_center_crop=False,
        do_pad=False,
        do_convert_rgb=True,
        size=side,
        crop_size=side,
        image_mean=[1.0]
        * 3,  # white is 0: otherwise the empty patches drown the strokes and reading is not learned
        image_std=[0.3] * 3,
    )
    return LlavaProcessor(
        image_processor,
        _build_tokenizer(MORE_WORDS[problems]),
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )


def _build_tokenizer(more_words: list[str]) -> PreTrainedTokenizerFast:
    numbers = set(range(LARGEST_NUMBER + 1)) | {side * side for triple in TRIPLES for side in triple}
    special = [PAD, END, USER, ASSISTANT, IMAGE, UNKNOWN]
    tokens = [*special, *TAGS, *WORDS, *map(str, sorted(numbers)), *more_words]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        # Special, since the processor glues image tokens together. The think tags are words: trainers
        # decode without special tokens, and rewards look for the tags.
        additional_special_tokens=[USER, ASSISTANT, IMAGE],
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(processor: LlavaProcessor, seed: int) -> LlavaForConditionalGeneration:
    """Make an untrained model. Sets torch's global seed."""
    tokenizer = processor.tokenizer
    vision = SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=NUM_HEADS,
        image_size=SIZE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=(SIZE // PATCH) ** 2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    model.set_attn_implementation("eager")
    _initialise(model)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


@torch.no_grad()
def _initialise(model: LlavaForConditionalGeneration) -> None:
    """Draw matrices with std 1/sqrt(fan-in), half of that where they write into the residual stream.

    A tower this small does not learn to read within minutes from the usual std 0.02.
    """
    residual = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight")
    embedding = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and parameter is not embedding and "position_embedding" not in name:
            fan_in = parameter[0].numel()
            parameter.normal_(std=(0.5 if name.endswith(residual) else 1.0) * fan_in**-0.5)
    embedding.normal_(std=0.06)


def cpu_settings(num_threads: int | None = None) -> dict[str, int | str]:
    """Make torch fast on this CPU and return what was set: `num_threads` and `matmul` (bf16 or ieee).

    On a CPU with bf16 instructions oneDNN may compute float32 matrix products in bf16; weights and sums stay
    float32. It does so with AMX. With AVX-512 bf16 alone it was seen to keep float32 precision and to be
    faster than the default all the same. Elsewhere nothing is changed. Both settings are global to the process.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    matmul = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.9 and later
    if matmul is not None and _has_bf16():
        matmul.fp32_precision = "bf16"
    return {"num_threads": torch.get_num_threads(), "matmul": getattr(matmul, "fp32_precision", "ieee")}


def _has_bf16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags)
