"""What a drafter is on disk. numpy and safetensors alone; no torch."""
