"""Batches: files of requests, each run in the bulk band by an RQ job, in the words of OpenAI's API."""
