"""What the plug-in adds: a template of the tasks of one host."""

from trireme.launch.process import TemplateType

FORK = TemplateType("trireme.fork.template:open_template")
