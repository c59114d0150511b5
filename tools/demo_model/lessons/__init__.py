"""What the demonstration model is taught: one file per subject. Each lesson makes a question from a random generator."""

from demo_model.lessons.question import Question, is_held_out

__all__ = ["Question", "is_held_out"]
