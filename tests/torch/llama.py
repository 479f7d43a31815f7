"""A Llama-shaped model of Transformers generates, greedily and sampled, while its KV cache grows."""
from job import count, deterministic, digest, hold, say

torch = deterministic()
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
                     num_attention_heads=8, max_position_embeddings=1024)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
start = torch.randint(0, 2048, (2, 16), device="cuda")
step = 0
with torch.no_grad():
    for sampled in (False, True):
        cache, tokens, all = DynamicCache(config=config), start, start
        for _ in range(count(120) // 2):
            scores = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1].float()
            if sampled:
                tokens = torch.multinomial(torch.softmax(scores / 0.8, -1), 1)
            else:
                tokens = scores.argmax(-1, keepdim=True)
            all = torch.cat([all, tokens], 1)
            step += 1
            hold(step)
        say("sampled" if sampled else "greedy", all[0, -12:].tolist(), digest(all, scores))
    all = model.generate(start, max_new_tokens=32, do_sample=True, pad_token_id=0)
    say("generate", digest(all))
