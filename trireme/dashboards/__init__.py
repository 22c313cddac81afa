"""What shows a job afterwards: TensorBoard, and the report on one page of HTML."""
