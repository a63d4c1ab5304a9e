"""What `laconic finetune` does: from a training recipe to a fine-tuned checkpoint."""
