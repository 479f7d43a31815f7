"""PEFT: adapters of low rank in a frozen model like Qwen2 are trained, merged into it, and the merged model generates."""
from job import deterministic, digest, say, steps

torch = deterministic()
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

config = Qwen2Config(vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
                     num_key_value_heads=2, max_position_embeddings=256, attn_implementation="eager")
model = get_peft_model(
    Qwen2ForCausalLM(config).to("cuda", torch.bfloat16),
    LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
taught = [p for p in model.parameters() if p.requires_grad]
best = torch.optim.AdamW(taught, lr=1e-3)
for step in steps(40):
    tokens = torch.randint(0, 1024, (8, 64), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    best.step()
    best.zero_grad()
    if step % 10 == 0:
        say(step, loss.item(), digest(*taught))
merged = model.merge_and_unload().eval()
say("generated", digest(merged.generate(tokens[:, :8], max_new_tokens=24, do_sample=True, pad_token_id=0)))
