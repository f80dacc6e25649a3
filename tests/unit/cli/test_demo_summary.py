"""What the demonstration says of instances that wait."""

from gpustackd.cli.demo_summary import reasons_of_waiting


def test_waiting_instances_with_one_reason_are_told_together() -> None:
    def waiting(number: int, model: str, code: str, message: str) -> dict[str, object]:
        reasons = [{"filter": "fit", "code": code}]
        return {"id": number, "name": f"{model}-{number}", "model": model, "state": "PENDING",
                "reasons": reasons, "state_message": message}  # fmt: skip

    rows = [
        waiting(1, "a", "vram", "5 GiB free"),
        waiting(2, "a", "vram", "4 GiB free"),
        waiting(3, "a", "ram", "no RAM"),
        waiting(4, "b", "vram", "3 GiB free\nsecond line"),
    ]
    assert reasons_of_waiting(rows) == [
        "a-1, a-2", "    4 GiB free", "a-3", "    no RAM", "b-4", "    3 GiB free", "    second line",
    ]  # fmt: skip
