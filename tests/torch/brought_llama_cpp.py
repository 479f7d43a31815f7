"""llama.cpp: a model of random weights, written here as a file with quantised tensors, decodes on the GPU, greedily and sampled."""
import os
import tempfile

import gguf
import llama_cpp as llama
import numpy

from job import count, digest, hold, say

WORDS, WIDTH, HEADS, GROUPS, INNER, LAYERS, LENGTH = 1024, 512, 8, 2, 1408, 6, 512
random = numpy.random.RandomState(12)


def write(path):
    file = gguf.GGUFWriter(path, "llama")
    file.add_vocab_size(WORDS)
    file.add_tokenizer_model("no_vocab")
    file.add_context_length(LENGTH)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(GROUPS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(WIDTH // HEADS)

    def matrix(name, rows, columns):
        values = (random.standard_normal((rows, columns)) / columns**0.5).astype(numpy.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        file.add_tensor(name + ".weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    def ones(name):
        file.add_tensor(name + ".weight", numpy.ones(WIDTH, numpy.float32))

    matrix("token_embd", WORDS, WIDTH)
    matrix("output", WORDS, WIDTH)
    ones("output_norm")
    for block in (f"blk.{i}." for i in range(LAYERS)):
        ones(block + "attn_norm")
        ones(block + "ffn_norm")
        for name, rows in (("q", WIDTH), ("k", WIDTH // HEADS * GROUPS), ("v", WIDTH // HEADS * GROUPS), ("output", WIDTH)):
            matrix(block + "attn_" + name, rows, WIDTH)
        matrix(block + "ffn_gate", INNER, WIDTH)
        matrix(block + "ffn_up", INNER, WIDTH)
        matrix(block + "ffn_down", WIDTH, INNER)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


if not llama.llama_supports_gpu_offload():
    raise SystemExit("llama.cpp has found no GPU")
path = os.path.join(tempfile.mkdtemp(), "model.gguf")
write(path)
settings = llama.llama_model_default_params()
settings.n_gpu_layers, settings.use_mmap = 99, False
model = llama.llama_model_load_from_file(path.encode(), settings)
settings = llama.llama_context_default_params()
settings.n_ctx, settings.n_batch, settings.n_threads, settings.n_threads_batch = LENGTH, 64, 1, 1
step = 0
for sampled in (False, True):
    context = llama.llama_init_from_model(model, settings)
    tokens, all = list(range(16)), []
    for _ in range(min(count(240) // 2, LENGTH - 16)):
        words = (llama.llama_token * len(tokens))(*tokens)  # the batch has its address
        if llama.llama_decode(context, llama.llama_batch_get_one(words, len(tokens))) != 0:
            raise SystemExit("llama_decode fails")
        scores = numpy.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (WORDS,)).copy()
        if sampled:
            chances = numpy.exp((scores - scores.max()).astype(numpy.float64))
            tokens = [int(random.choice(WORDS, p=chances / chances.sum()))]
        else:
            tokens = [int(scores.argmax())]
        all += tokens
        step += 1
        hold(step)
    say("sampled" if sampled else "greedy", all[-12:], digest(scores))
    llama.llama_free(context)
