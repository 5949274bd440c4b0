"""Device memory over a step: who holds how much (`live`), the executor adds (`executor`), where the host must wait (`throttle`)."""
