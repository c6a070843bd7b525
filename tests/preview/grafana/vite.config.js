import { defineConfig } from 'vite';
import react from '@vitejs/plugin-react';

// `modules`: the folder in which npm has installed. The page's folder has no node_modules.
export default defineConfig({
  plugins: [react()],
  base: './',
  define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}', global: 'globalThis' },
  resolve: { dedupe: ['react', 'react-dom', '@emotion/react', '@emotion/css'] },
  build: { minify: false, chunkSizeWarningLimit: 20000 },
});
