# Functions for deb and rpm. tools/node_package.py adds them to each script of a package.
units="gpu-exporter.service gpu-exporter-slurm-collector.service gpu-exporter-digest.timer"

forget_compiled() {
    find /opt/gpu-exporter -depth -type d -name __pycache__ -exec rm -rf {} + 2>/dev/null || :
}

after_install() {
    forget_compiled
    # A start from compiled modules takes a third of the time. Without a Python, this prints which one to install.
    /opt/gpu-exporter/bin/python -I -m compileall -q $(find /opt/gpu-exporter -maxdepth 2 -type d -name lib) || :
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload || :
        systemctl try-restart gpu-exporter.service gpu-exporter-slurm-collector.service || :
    fi
}

before_removal() {
    if [ -d /run/systemd/system ]; then systemctl stop $units || :; fi
    if command -v systemctl >/dev/null; then systemctl --quiet disable $units 2>/dev/null || :; fi
    forget_compiled
}

after_removal() {
    forget_compiled
    find /opt/gpu-exporter -depth -type d -empty -delete 2>/dev/null || : # folders of earlier versions
    if [ -d /run/systemd/system ]; then systemctl daemon-reload || :; fi
}

remove_state() {
    rm -rf /var/lib/gpu-exporter /var/lib/gpu-exporter-slurm /var/lib/gpu-exporter-digest
}
