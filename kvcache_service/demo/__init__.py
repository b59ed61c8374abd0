"""`kvcache demo`: agents on a real model through the real service, measured against dense prefill."""
