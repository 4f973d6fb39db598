"""An engine in another process: a vLLM server that `qarl-trl serve` starts.

The trainer's side is `client`, a `VLLMClient` of TRL. The server is vLLM's own, with two classes of ours that its
command line names: `guard`, which decides on requests, and `worker`, which loads a sync in each process of the engine.
Weights go through a folder that both mount:

    trainer    client.sync -> files.save_parts, then POST /qarl_load
    server     guard -> worker_calls -> worker.qarl_load -> files.read_parts, vllm/reloading.py

`facts` says what both must have in common, and `key` is what the trainer shows with each request.
"""
