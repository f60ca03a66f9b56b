"""Where a NaN or an infinity in a result begins: ``detect_anomaly``."""

from funcgrad._anomaly._detect import AnomalyError as AnomalyError
from funcgrad._anomaly._detect import detect_anomaly as detect_anomaly
from funcgrad._anomaly._report import Anomaly as Anomaly
