"""Benchmarks of unlearning: their questions and answers, read from files and checked, or generated in miniature."""
