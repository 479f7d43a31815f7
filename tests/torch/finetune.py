"""Transformers' Trainer fine-tunes a classifier like BERT: Accelerate beneath, accumulated and clipped gradients, a schedule."""
import tempfile

from job import count, deterministic, digest, hold, say

torch = deterministic()
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainerCallback, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = torch.randint(0, 512, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.sum() % 3}


class Held(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **more):
        if state.global_step % 10 == 0:
            say(state.global_step, digest(*model.parameters()))
        hold(state.global_step)


config = BertConfig(vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
                    num_labels=3, attn_implementation="eager")
settings = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=count(40), per_device_train_batch_size=16, gradient_accumulation_steps=2,
    warmup_steps=5, max_grad_norm=1.0, bf16=True, seed=1, report_to="none", save_strategy="no", logging_strategy="no",
    disable_tqdm=True)
trainer = Trainer(BertForSequenceClassification(config), settings, train_dataset=Sentences(), callbacks=[Held()])
trainer.remove_callback(PrinterCallback)  # it prints how long the training took
found = trainer.train()
say("trained", found.training_loss, digest(*trainer.model.parameters()))
