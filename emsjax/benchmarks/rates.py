"""How fast a device reads memory and multiplies matrices."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes read per second and bfloat16 FLOPs per second."""

    read: float
    matmul: float

    def describe(self) -> dict[str, float]:
        return {"read_tb_per_s": self.read / 1e12, "matmul_tflop_per_s": self.matmul / 1e12}


MEASURED_RATES = {"NVIDIA H200": Rates(read=4.35e12, matmul=790e12)}  # by kind of device
