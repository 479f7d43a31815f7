//! GPU architectures as images of code name them: `sm_75`, `sm_90a`, `sm_120f`.

use std::fmt;

/// The compute capability of a device, as the driver's device attributes give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sm {
    /// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
    pub major: u32,
    /// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
    pub minor: u32,
}

impl From<(u32, u32)> for Sm {
    fn from((major, minor): (u32, u32)) -> Self {
        Self { major, minor }
    }
}

/// How widely code for an architecture may run: the letter after the number.
///
/// Later is narrower; between two entries for the same number the narrower one is preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Variant {
    /// `sm_90`: the features that later GPUs have too.
    Generic,
    /// `sm_100f`: features of the family, which are its number and higher ones of the same major.
    Family,
    /// `sm_90a`: features of exactly this GPU.
    Specific,
}

/// The architecture that an entry of an image was compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arch {
    /// Ten times the major plus the minor compute capability: 75, 90, 120.
    pub number: u32,
    /// The letter after the number.
    ///
    /// Only a fatbin's entry and PTX tell it. A cubin alone does not (nvcc 13.0 writes the same ELF
    /// header for `sm_90` and `sm_90a`), and counts as [`Variant::Generic`].
    pub variant: Variant,
}

/// Tegra's GPUs. Their cubins run on them alone, and theirs are the only cubins they run, whatever
/// the numbers say (CUDA C++ programming guide, "Binary Compatibility").
const TEGRA: [u32; 8] = [53, 62, 72, 87, 88, 101, 110, 32];

impl Arch {
    /// The compute capability that the number stands for.
    #[must_use]
    pub fn sm(self) -> Sm {
        Sm { major: self.number / 10, minor: self.number % 10 }
    }

    /// Whether machine code for `self` runs on `device`: the same major and no higher minor.
    #[must_use]
    pub fn cubin_runs_on(self, device: Sm) -> bool {
        let own = self.sm();
        let same = own == device;
        let number = device.major.saturating_mul(10).saturating_add(device.minor);
        let tegra = TEGRA.contains(&self.number) || TEGRA.contains(&number);
        match self.variant {
            Variant::Specific => same,
            Variant::Generic | Variant::Family => {
                same || (!tegra && own.major == device.major && own.minor <= device.minor)
            }
        }
    }

    /// Whether PTX for `self` can be compiled for `device`: any later GPU for plain PTX, the family
    /// for `f`, the GPU itself for `a`.
    #[must_use]
    pub fn ptx_runs_on(self, device: Sm) -> bool {
        match self.variant {
            Variant::Generic => self.sm() <= device,
            Variant::Family | Variant::Specific => self.cubin_runs_on(device),
        }
    }

    /// Reads `sm_90a` or `compute_90a`, as PTX's `.target` writes them.
    pub(super) fn from_name(name: &[u8]) -> Option<Self> {
        let rest = name.strip_prefix(b"sm_").or_else(|| name.strip_prefix(b"compute_"))?;
        let (digits, variant) = match rest.split_last()? {
            (b'a', head) => (head, Variant::Specific),
            (b'f', head) => (head, Variant::Family),
            _ => (rest, Variant::Generic),
        };
        if digits.is_empty() || digits.len() > 4 || !digits.iter().all(u8::is_ascii_digit) {
            return None;
        }
        let number = digits.iter().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
        Some(Self { number, variant })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.variant {
            Variant::Generic => "",
            Variant::Family => "f",
            Variant::Specific => "a",
        };
        write!(f, "sm_{}{letter}", self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arch(name: &str) -> Arch {
        Arch::from_name(name.as_bytes()).unwrap()
    }

    #[test]
    fn names() {
        for name in ["sm_75", "sm_90a", "sm_120f"] {
            assert_eq!(arch(name).to_string(), name);
        }
        for name in ["sm_", "sm_a", "90", "sm_9x0", "sm_12345", "sm_-1", ""] {
            assert_eq!(Arch::from_name(name.as_bytes()), None, "{name}");
        }
    }

    #[test]
    fn cubins_run_within_a_major() {
        assert!(arch("sm_80").cubin_runs_on((8, 6).into()));
        assert!(arch("sm_80").cubin_runs_on((8, 0).into()));
        assert!(!arch("sm_86").cubin_runs_on((8, 0).into()));
        assert!(!arch("sm_80").cubin_runs_on((9, 0).into()));
        assert!(!arch("sm_87").cubin_runs_on((8, 9).into()));
        assert!(arch("sm_87").cubin_runs_on((8, 7).into()));
        assert!(!arch("sm_100a").cubin_runs_on((10, 3).into()));
        assert!(arch("sm_100f").cubin_runs_on((10, 3).into()));
        assert!(!arch("sm_120f").cubin_runs_on((10, 3).into()));
    }

    #[test]
    fn ptx_runs_on_later_gpus() {
        assert!(arch("sm_75").ptx_runs_on((9, 0).into()));
        assert!(!arch("sm_90").ptx_runs_on((7, 5).into()));
        assert!(!arch("sm_90a").ptx_runs_on((10, 0).into()));
        assert!(arch("sm_90a").ptx_runs_on((9, 0).into()));
        assert!(arch("sm_100f").ptx_runs_on((10, 3).into()));
        assert!(!arch("sm_100f").ptx_runs_on((12, 0).into()));
    }
}
