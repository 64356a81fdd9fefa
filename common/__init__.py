"""The vocabulary both engines share: models, data, policies, mesh, bucket plan, gradient contract, engine contract.

Imports torch and the standard library only; `common.harness` runs and judges engines by name.
"""
